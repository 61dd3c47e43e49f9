"""Speaks to the workers of one engine through any executor, in typed messages. Knows no backend and no tensor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from fourfold.checkpoints.sharded_index import ShardedTensor, write_index
from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.executor import Executor
from fourfold.contracts.kv_cache_spec import KVCacheConfig
from fourfold.engine.refusal import refusal
from fourfold.errors import ConfigError, EngineError, WorkerError
from fourfold.messages import InitializeCache, StageFigures, StepMessage, StepOutput, WorkerInfo


class ExecutorClient:
    """The worker methods of one engine as typed calls, for every executor alike."""

    def __init__(self, executor: Executor, config: EngineConfig, *, started: float | None = None) -> None:
        """``started`` is the ``time.monotonic`` from which --startup-timeout counts; by default it is now."""
        self._executor = executor
        self._ready_by = (time.monotonic() if started is None else started) + config.timeouts.startup_timeout
        self._startup_timeout = config.timeouts.startup_timeout
        self._tensor_parallel_size = config.parallel.tensor_parallel_size
        self._rpc_timeout = config.timeouts.rpc_timeout
        self._encoder = msgspec.msgpack.Encoder()
        self._step_decoder = msgspec.msgpack.Decoder(StepOutput)
        self._info_decoder = msgspec.msgpack.Decoder(WorkerInfo)
        asked = config.scheduler.max_in_flight
        if asked is not None and asked > executor.max_in_flight:
            raise ConfigError(
                f"--max-in-flight is {asked}, and executor {config.backends.executor!r} takes "
                f"{executor.max_in_flight} at most; lower it or choose another --executor"
            )
        self._asked_in_flight = asked
        self._stages = config.parallel.pipeline_parallel_size
        self._asynchronous = False

    @property
    def max_in_flight(self) -> int:
        """How many steps should be in the air at once; known after ``load``.

        One a stage, and one more where devices work by themselves: its inputs are prepared meanwhile. Elsewhere one
        more would only delay the replies.
        """
        wanted = self._asked_in_flight or self._stages + self._asynchronous
        return min(wanted, self._executor.max_in_flight)

    @property
    def world_size(self) -> int:
        """Ranks of this engine."""
        return self._executor.world_size

    def load(self) -> list[WorkerInfo]:
        """Load the weights on every rank; what each rank says of itself, in rank order."""
        replies = self._executor.collective_rpc("load", timeout=self._startup_left())
        workers = [self._info_decoder.decode(reply) for reply in replies]
        self._asynchronous = all(info.asynchronous for info in workers)
        return workers

    def initialize_cache(self, cache: KVCacheConfig) -> None:
        """Allocate the KV cache on every rank."""
        message = self._encoder.encode(InitializeCache(cache=cache))
        self._executor.collective_rpc("initialize_cache", args=(message,), timeout=self._startup_left())

    def warm_up(self) -> None:
        """Run a real forward pass on every rank, so that the first request meets nothing cold."""
        self._executor.collective_rpc("warm_up", timeout=self._startup_left())
        if self._executor.processes():
            self._executor.collective_rpc("settle", timeout=self._startup_left())

    def execute_model(self, step: StepMessage) -> StepReply:
        """Start one step; what is returned has the output rank's reply, or the error of any rank."""
        reply = self._executor.collective_rpc(
            "execute_model",
            args=(self._encoder.encode(step),),
            timeout=self._rpc_timeout,
            reply_rank=self._executor.output_rank,
            non_block=True,
        )
        return StepReply(reply, self._step_decoder)

    def stage_figures(self) -> Future[list[StageFigures]]:
        """What the first rank of each stage says of itself; in order with steps, and not waited for."""
        reply = self._executor.collective_rpc("stage_figures", timeout=self._rpc_timeout, non_block=True)

        def decode(replies: list[bytes]) -> list[StageFigures]:
            firsts = replies[:: self._tensor_parallel_size]
            return [msgspec.msgpack.decode(first, type=StageFigures) for first in firsts]

        return _decoded(reply, decode)

    def layer_report(self) -> list[dict[str, Any]]:
        """What the layers of each stage show, by name; see ``StepPart.report``."""
        replies = self._executor.collective_rpc("layer_report", timeout=self._rpc_timeout)
        return [msgspec.msgpack.decode(reply) for reply in replies[:: self._tensor_parallel_size]]

    def check_health(self, timeout: float) -> None:
        """Return when every rank has answered within ``timeout`` seconds; raises as ``collective_rpc`` does."""
        self._executor.collective_rpc("check_health", timeout=timeout)

    def save_sharded_state(self, folder: str | os.PathLike[str]) -> None:
        """Save what every rank holds into a new folder, which is then a checkpoint for any cut.

        Ranks on several hosts need a folder that all of them see. Raises WorkerError for one that is in use.
        """
        target = Path(folder).absolute()
        replies = self._executor.collective_rpc(
            "save_sharded_state", args=(str(target),), timeout=self._startup_timeout
        )
        decoder = msgspec.msgpack.Decoder(dict[str, ShardedTensor])
        write_index(target, [decoder.decode(reply) for reply in replies])

    def sleep(self, level: int) -> None:
        """Give the memory of weights and KV cache back on every rank; see ``Worker.sleep``."""
        self._call_all("sleep", level)

    def wake_up(self, tags: Sequence[str], *, complete: bool) -> None:
        """Take the memory named by ``tags`` again; ``complete``: nothing sleeps then. Raises ConfigError."""
        self._call_all("wake_up", list(tags), complete)

    def check_weights(self, model: str) -> None:
        """Raise ConfigError unless every rank can take the weights of ``model`` in place of its own."""
        self._call_all("check_weights", model)

    def discard_weights(self) -> None:
        """Let go of the weights on every rank."""
        self._call_all("discard_weights")

    def load_weights(self, model: str) -> None:
        """Read the weights of ``model`` on every rank; raises ConfigError, and then there are none."""
        self._call_all("load_weights", model)

    def load_adapter(self, slot: int, folder: str) -> None:
        """Read a LoRA adapter into a slot of every rank. Raises ConfigError for one that does not fit, and then no rank
        has it.
        """
        try:
            self._call_all("load_adapter", slot, folder)
        except ConfigError:
            self.unload_adapter(slot)
            raise

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot of every rank."""
        self._call_all("unload_adapter", slot)

    def _call_all(self, method: str, *args: object) -> None:
        """Call all ranks for what may take as long as a start; what a rank refuses comes out as ConfigError."""
        try:
            self._executor.collective_rpc(method, args=args, timeout=self._startup_timeout)
        except WorkerError as error:
            raise refusal(error, num_ranks=self.world_size) or error from error

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Trace every rank from now on; raises WorkerError where a profile is running."""
        self._executor.collective_rpc("start_profile", args=(str(Path(folder).absolute()),))

    def stop_profile(self) -> list[Path]:
        """Write a trace a rank, for a trace viewer, and return the paths; raises WorkerError where none is running."""
        replies = self._executor.collective_rpc("stop_profile", timeout=self._startup_timeout)
        return [Path(reply) for reply in replies]

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once when the executor breaks for good; at once if it already has."""
        self._executor.on_failure(callback)

    def processes(self) -> list[dict[str, Any]]:
        """The workers' own processes, as ``EngineReady.workers`` shows them."""
        return self._executor.processes()

    def shutdown(self) -> None:
        """End all workers; idempotent."""
        self._executor.shutdown()

    def _startup_left(self) -> float:
        """Seconds of --startup-timeout that are left."""
        return max(0.0, self._ready_by - time.monotonic())


class StepReply:
    """The reply to one step, decoded when it is taken."""

    __slots__ = ("_decoder", "_reply")

    def __init__(self, reply: Future[bytes], decoder: msgspec.msgpack.Decoder[StepOutput]) -> None:
        self._reply = reply
        self._decoder = decoder

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for it; raises TimeoutError, and what ended the step."""
        return self._decoder.decode(self._reply.result(timeout))


def _decoded(reply: Future[Any], decode: Callable[[Any], list[StageFigures]]) -> Future[list[StageFigures]]:
    """A future of the decoded reply that is done when ``reply`` is."""
    result: Future[list[StageFigures]] = Future()
    result.set_running_or_notify_cancel()  # a call cannot be taken back once the workers have it

    def pass_on(done: Future[Any]) -> None:
        try:
            result.set_result(decode(done.result()))
        except BaseException as error:  # whatever the reply is, the waiting engine must learn it
            result.set_exception(error)

    reply.add_done_callback(pass_on)
    return result
