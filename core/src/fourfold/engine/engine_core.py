"""The engine core: takes requests, keeps steps in the air, hands out what they bring. Knows no socket and no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from time import perf_counter, time
from typing import Any

import msgspec

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig
from fourfold.contracts.scheduling_policy import SchedulingPolicy
from fourfold.contracts.step_part import StepVote
from fourfold.coordinator.waves import PauseMode
from fourfold.engine.adapters import Adapters
from fourfold.engine.batch import Batch
from fourfold.engine.core_events import CoreEvents
from fourfold.engine.kv_cache_manager import KVCacheManager, request_capacity
from fourfold.engine.operations import Call, check_mode
from fourfold.engine.request import Request
from fourfold.engine.scheduler import Scheduler, failure
from fourfold.engine.sleep import Sleep
from fourfold.engine.stage_watch import StageWatch
from fourfold.engine.step_client import StepClient, StepReply
from fourfold.errors import EngineError, RequestError, RpcTimeout
from fourfold.messages import AddRequest, EngineStats, FinishReason, RequestOutput, StepOutput

_GRACE = 1.0
"""Seconds beyond the deadline of a step, so that the executor, which knows the missing ranks, is first to report."""


class EngineCore:
    """Drives one executor. One thread calls it; ``step`` is the only method that waits."""

    def __init__(
        self,
        config: EngineConfig,
        client: StepClient,
        *,
        kv_cache: KVCacheConfig,
        max_model_len: int,
        vocabulary_size: int,
        policy: SchedulingPolicy,
        events: CoreEvents | None = None,
    ) -> None:
        scheduler = config.scheduler
        self._client = client
        self._events = events
        self._max_model_len = max_model_len
        self._vocabulary_size = vocabulary_size
        self._max_num_waiting = scheduler.max_num_waiting
        # Engines that step together learn after each step whether there is another one.
        self._depth = 1 if config.parallel.lockstep else client.max_in_flight
        self._vote: StepVote | None = None
        self._reduced: StepVote | None = None
        self._rpc_timeout = config.timeouts.rpc_timeout
        self._num_workers = config.parallel.layout.engine_world_size
        self._capacity = request_capacity(kv_cache) or max_model_len
        self._scheduler = Scheduler(
            cache=KVCacheManager(kv_cache, prefix_caching=config.cache.prefix_caching),
            policy=policy,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_slots=scheduler.num_slots,
            # The stages of a pipeline each work on another batch; a request's next token needs all of them.
            num_batches=min(config.parallel.pipeline_parallel_size, self._depth),
        )
        is_pipeline = config.parallel.pipeline_parallel_size > 1
        self._stage_watch = StageWatch(client, self._scheduler.stats) if is_pipeline else None
        self._in_flight: deque[tuple[Batch, StepReply, float]] = deque()
        self._sleep = Sleep(client, self._scheduler.stats)
        self._pause: PauseMode | None = None
        self._adapters = Adapters(client, config.lora)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._in_flight or self._may_launch)

    @property
    def _may_launch(self) -> bool:
        """Whether a request is to go on."""
        if self._sleep.halted or self._pause in ("abort", "keep"):
            return False
        return self._scheduler.has_begun if self._pause == "wait" else bool(self._scheduler.requests)

    @property
    def stats(self) -> EngineStats:
        """The engine as it stands. One object, brought up to date at each access."""
        return self._scheduler.snapshot()

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Queue a request. Returns its only output if it is refused: status 400 for what can never run, 429 when
        too many wait. A request of the same id is not affected.
        """
        scheduler = self._scheduler
        try:
            self._check(request)
            slot = self._find_slot(request)
        except RequestError as error:
            return failure(request.request_id, str(error), error.status)
        num_prompt = len(request.prompt_token_ids)
        limit = self._max_model_len
        if request.sampling.max_tokens is not None:
            limit = min(limit, num_prompt + request.sampling.max_tokens)
        # The last token is never computed itself, so it needs no place in the cache. A request that outgrows the
        # whole cache ends there with LENGTH, as at the end of the context.
        scheduler.add(Request(request, max_total=min(limit, self._capacity + 1), adapter_slot=slot))
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without another output; ids that are unknown or ended are ignored."""
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._scheduler.finish(request)
                output = RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
                self._tell_finished({request.client: [output]})

    def abort_client(self, client: int, died: float) -> None:
        """End all requests that an API server had when it died, in Unix seconds, without another output."""
        requests = self._scheduler.requests.values()
        self.abort([one.request_id for one in requests if one.client == client and one.arrival_time <= died])

    def step(self) -> dict[int, list[RequestOutput]]:
        """Fill the air with steps, wait for the oldest, and return what it brought: client -> outputs.

        Raises what ended the step: WorkerError, RpcTimeout, ExecutorFailed, ExecutorClosed. Then ``fail_all``.
        """
        started = perf_counter()
        waited = self._launch()
        if not self._in_flight:
            if self.has_work:
                raise EngineError(f"{len(self._scheduler.requests)} requests wait and none can start")
            return {}
        return self._finish_oldest(started, waited)

    def settle(self) -> Iterator[dict[int, list[RequestOutput]]]:
        """Wait for the steps in the air and start no others; yields what each brings, and raises as ``step`` does."""
        while self._in_flight:
            yield self._finish_oldest(perf_counter(), 0.0)

    def _finish_oldest(self, started: float, waited: float) -> dict[int, list[RequestOutput]]:
        waiting_since = perf_counter()
        batch, reply, deadline = self._in_flight[0]
        try:
            output = reply.result(max(0.0, deadline - waiting_since))
        except TimeoutError as error:
            if isinstance(error, EngineError):
                raise
            raise RpcTimeout("execute_model", self._rpc_timeout, range(self._num_workers)) from error
        waited += perf_counter() - waiting_since
        outputs = self._scheduler.update(batch, output)
        self._in_flight.popleft()
        self._reduced = output.vote
        if output.counters:
            self._scheduler.stats.layer_counters = [output.counters]
        if self._adapters.are_leaving:
            self._drop_adapters()
        self._count(started, min(waited, output.forward_seconds))
        if self._stage_watch is not None:
            self._stage_watch.step_returned(started=started, air_is_empty=not self._in_flight)
        if self._events is not None:
            self._tell_finished(outputs)
            self._events.step_finished(self.stats)
        return outputs

    def step_together(self, vote: StepVote) -> tuple[dict[int, list[RequestOutput]], StepVote]:
        """``step``, with or without work, at the same time as other engines; also what the votes of all come to."""
        self._vote = vote
        outputs = self.step()
        if self._reduced is None:
            raise EngineError("the workers returned no vote of a step that all engines made together")
        return outputs, self._reduced

    def fail_all(self, message: str) -> dict[int, list[RequestOutput]]:
        """End every request with an error, and forget the steps in the air: client -> outputs. For a broken engine."""
        outputs = self._end_all(message, status=500)
        while self._in_flight:
            self._scheduler.drop(self._in_flight.popleft()[0])
        return outputs

    def _end_all(self, message: str, *, status: int) -> dict[int, list[RequestOutput]]:
        outputs: dict[int, list[RequestOutput]] = {}
        for request in list(self._scheduler.requests.values()):
            self._scheduler.finish(request)
            outputs.setdefault(request.client, []).append(failure(request.request_id, message, status))
        self._tell_finished(outputs)
        return outputs

    def operate(self, calls: Sequence[Call], *, timeout: float) -> None:
        """Make calls one after the other, for an engine in the caller's own process; what steps in the air bring is
        nobody's any more. ``timeout`` is the executor's own here.
        """
        for _ in self.settle():
            pass
        for method, arguments in calls:
            getattr(self, method)(**arguments)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on."""
        self._scheduler.reset_prefix_cache()

    def pause(self, mode: PauseMode) -> dict[int, list[RequestOutput]]:
        """Let no request begin until ``resume``. Those that have begun stay as they are (``keep``) or are finished
        (``wait``); or all end with an error (``abort``), which is returned: client -> outputs. Requests that come are
        queued. The steps in the air still return; ``has_work`` says when nothing is left to do.

        Raises RequestError for another mode.
        """
        check_mode(mode)
        self._pause = mode
        self._scheduler.admits_new = False
        if mode != "abort":
            return {}
        return self._end_all("the engine was paused", status=503)

    def confirm_pause(self) -> None:
        """Whoever had to go on has, here and on the engines that step together with this one."""
        self._set_paused(True)

    def resume(self) -> None:
        """Go on after a pause; while anything sleeps, nothing happens."""
        if not self._sleep.halted:
            self._pause = None
            self._scheduler.admits_new = True
            self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        stats = self._scheduler.stats
        if paused != stats.paused:
            stats.paused = paused
            stats.state_changes += 1

    def halt(self) -> None:
        """Start no step any more, until ``wake_up`` or ``load_weights``. Running requests wait, and what was computed
        of them is computed again; requests that come are queued. Only when no step is in the air, as all that follow.
        """
        if self._in_flight:
            raise EngineError(f"{len(self._in_flight)} steps are in the air; settle them first")
        self._sleep.halted = True
        self._scheduler.preempt_all()
        self._scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache and of the weights back; requests that come are refused with status 503.

        At level 1 weights go to the host's memory, at level 2 they are read again at ``wake_up``.
        """
        self.halt()
        self._sleep.fall_asleep(level)

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory named by ``tags`` again, all by default; with all of it requests go on, unless
        there is a pause.

        Raises RequestError for an unknown tag, ConfigError for weights that cannot be read: they stay asleep.
        """
        self._sleep.wake_up(tags)

    def check_weights(self, model: str) -> None:
        """Raise ConfigError unless ``load_weights`` can load those of ``model``."""
        self._client.check_weights(model)

    def discard_weights(self) -> None:
        """Let go of the weights, on all replicas before one of them loads others."""
        self.halt()
        self._sleep.discard_weights()

    def load_weights(self, model: str) -> None:
        """Read the weights of another checkpoint of the model, and go on with those, unless there is a pause.

        Raises ConfigError for weights that cannot be read: they are asleep then.
        """
        self._sleep.load_weights(model)

    def layer_report(self) -> list[dict[str, Any]]:
        """What the layers of each stage show, after the steps in the air; see ``StepPart.report``."""
        return self._client.layer_report()

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, for requests that name it. Raises RequestError and ConfigError; then nothing changes."""
        self._drop_adapters()
        self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter, and forget it when those that there are have ended."""
        self._adapters.unload(name)
        self._drop_adapters()

    def _drop_adapters(self) -> None:
        self._adapters.drop(request.adapter for request in self._scheduler.requests.values())

    def prefix_marks(self) -> bytes:
        """What the prefix cache holds, as ``EngineStats.prefix_marks``; some 0.1 ms."""
        return self._scheduler.prefix_marks()

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once, on any thread, when the workers are lost for good; at once if they are."""
        self._client.on_failure(callback)

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        self._client.shutdown()

    def _launch(self) -> float:
        """Send steps until the air is full; returns seconds in the executor, which may compute at once."""
        waited = 0.0
        while len(self._in_flight) < self._depth:
            batch = self._scheduler.schedule() if self._may_launch else None
            if self._vote is not None:
                batch = batch or self._scheduler.idle()
                batch.message = msgspec.structs.replace(batch.message, vote=self._vote)
            if batch is None:
                break
            sent = perf_counter()
            reply: StepReply
            try:
                reply = self._client.execute_model(batch.message)
            except EngineError as error:  # comes out in its turn, after the steps before it
                failed: Future[StepOutput] = Future()
                failed.set_exception(error)
                reply = failed
            waited += perf_counter() - sent
            self._in_flight.append((batch, reply, sent + self._rpc_timeout + _GRACE))
        return waited

    def _check(self, request: AddRequest) -> None:
        scheduler = self._scheduler
        if request.request_id in scheduler.requests:
            raise RequestError(f"there is a request called {request.request_id!r} already; choose another id")
        if not request.attempt and scheduler.num_waiting >= self._max_num_waiting + scheduler.num_vacant:
            raise RequestError(f"{scheduler.num_waiting} requests are waiting; try again later", status=429)
        if self._sleep.asleep and not request.attempt:
            raise RequestError(f"the engine is asleep ({', '.join(self._sleep.asleep)}); wake it up first", status=503)
        prompt = request.prompt_token_ids
        if not prompt:
            raise RequestError("the prompt is empty; it needs a token", parameter="prompt")
        if len(prompt) >= self._max_model_len:
            raise RequestError(
                f"the context is {self._max_model_len} tokens and the prompt has {len(prompt)}; it must leave room for "
                "one token of output",
                parameter="prompt",
                code="context_length_exceeded",
            )
        num_known = len(prompt) + len(request.output_token_ids)
        if num_known > self._capacity:
            raise RequestError(
                f"the prompt has {num_known} tokens and the KV cache holds {self._capacity}", parameter="prompt"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary_size:
            worst = min(prompt) if min(prompt) < 0 else max(prompt)
            raise RequestError(
                f"the prompt has token id {worst}; the vocabulary is 0 to {self._vocabulary_size - 1}",
                parameter="prompt",
            )
        request.sampling.check_vocabulary(self._vocabulary_size)

    def _find_slot(self, request: AddRequest) -> int:
        if not request.adapter:
            return 0
        if request.attempt:
            self._drop_adapters()
            return self._adapters.slot_to_finish(request.adapter, request.adapter_folder)
        return self._adapters.slot_of(request.adapter)

    def _count(self, started: float, forward_seconds: float) -> None:
        stats = self._scheduler.stats
        elapsed = perf_counter() - started
        stats.num_steps += 1
        stats.last_step_time = time()
        stats.step_seconds += elapsed
        stats.overhead_seconds += elapsed - forward_seconds

    def _tell_finished(self, outputs: dict[int, list[RequestOutput]]) -> None:
        if self._events is None:
            return
        for group in outputs.values():
            for output in group:
                if output.finish_reason is not None:
                    self._events.request_finished(output)
