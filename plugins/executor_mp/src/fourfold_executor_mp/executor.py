"""Gives every rank of one engine a fresh interpreter on this host. Fails as one: if a rank is lost, the others end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import msgspec

from fourfold.config.transport import encode_config
from fourfold.contracts.executor import Aggregate, Method
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, EngineError, ExecutorClosed, ExecutorFailed, WorkerError
from fourfold.manifest import Fingerprint, compare_all
from fourfold.rpc_method import method_name
from fourfold.serialization import decode, encode
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import process_state
from fourfold_executor_mp.call import Call, Replies
from fourfold_executor_mp.channels import Channels
from fourfold_executor_mp.start_message import CONSTRUCTION, DISCOVERY, StartMessage

logger = logging.getLogger(__name__)

ROLE: Final = "worker"
_GRACE: Final = 2.0
"""Seconds for idle ranks to let their workers go; an engine itself has 5."""
_BUSY_GRACE: Final = 0.5
"""The same for ranks in the middle of a call, which may wait for a rank that failed and would never come back."""
_SHUTDOWN_TIMEOUT: Final = 15.0
"""Seconds that a second caller of ``shutdown`` waits for the first."""


class MpExecutor:
    """A process per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Start all ranks at once and wait until each has built its worker.

        Raises WorkerError or ExecutorFailed for a rank that cannot, PluginError and ConfigError for ranks that differ,
        RpcTimeout past --startup-timeout; no process is left then.
        """
        self._layout = context.layout
        self._dp_rank = context.dp_rank
        self._timeout = context.config.timeouts.rpc_timeout
        self._state = threading.Lock()  # guards the three below, never held for long
        self._closed = False
        self._failure: EngineError | None = None
        self._callbacks: list[Callable[[EngineError], None]] = []
        self._down = threading.Event()
        self._children: list[ChildProcess] = []
        streams = [socket.socketpair() for _ in range(self.world_size)]
        self._channels = Channels([ours for ours, _ in streams], describe=self._describe, on_broken=self._break)
        self._supervisor = ChildSupervisor()
        try:
            self._start_ranks([theirs for _, theirs in streams])
            self._start_workers(context)
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        """Ranks of this engine."""
        return self._layout.engine_world_size

    @property
    def output_rank(self) -> int:
        """The rank that samples."""
        return self._layout.output_rank

    @property
    def max_in_flight(self) -> int:
        """A step for every stage of the pipeline, and one that waits for them."""
        return self._layout.pp + 1

    def collective_rpc(
        self,
        method: Method,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        reply_rank: int | None = None,
        aggregate: Aggregate | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker method on every rank; see ``fourfold.contracts.executor.Executor``."""
        name = method_name(method)
        if reply_rank is not None and not 0 <= reply_rank < self.world_size:
            raise ConfigError(f"reply_rank is {reply_rank}; this executor has ranks 0 to {self.world_size - 1}")
        limit = self._timeout if timeout is None else timeout
        # With a fold every rank's reply is needed, whoever is to have the result.
        speaker = None if aggregate is not None else reply_rank
        payload = encode([name, list(args), dict(kwargs or {}), speaker])
        shape = partial(_shape, speaker, aggregate)
        if non_block:
            future: Future[Any] = self._channels.send(name, payload, timeout=limit, shape=shape).future
            return future
        return shape(self._channels.send(name, payload, timeout=limit, shape=_as_they_came).wait())

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once, on a thread of this executor, when a rank is lost; at once if one is already."""
        with self._state:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs."""
        rows = []
        for rank, child in enumerate(self._children):
            with contextlib.suppress(ProcessLookupError):
                rows.append(msgspec.to_builtins(process_state(ROLE, self._label(rank), "running", pid=child.pid)))
        return rows

    def shutdown(self) -> None:
        """End all ranks; idempotent, from any thread. Calls on their way end with ExecutorClosed."""
        with self._state:
            first, self._closed = not self._closed, True
        if not first:
            if not self._channels.on_thread:
                self._down.wait(_SHUTDOWN_TIMEOUT)
            return
        try:
            busy = self._channels.stop(
                lambda name: ExecutorClosed(f"{name!r} was called after shutdown"),
                lambda call: ExecutorClosed(f"{call.name!r} was on its way at shutdown"),
            )
            # Ranks ignore SIGTERM, which may come to the whole process group when it is for the server alone.
            self._supervisor.close(grace=_BUSY_GRACE if busy else _GRACE, terminate=0)
            self._channels.close()
        finally:
            self._down.set()

    # --- start ---------------------------------------------------------------------------------------------------

    def _start_ranks(self, streams: Sequence[socket.socket]) -> None:
        with contextlib.ExitStack() as ours:  # what the ranks inherit is theirs alone afterwards
            for stream in streams:
                ours.enter_context(stream)
            # Where ranks meet before they can talk: no port, no name, and gone with the last process that holds it.
            rendezvous = os.memfd_create("fourfold-rendezvous")
            ours.callback(os.close, rendezvous)
            for rank, stream in enumerate(streams):
                self._children.append(
                    self._supervisor.start(
                        self._command(rank, stream.fileno(), rendezvous),
                        on_exit=partial(self._note_exit, rank),
                    )
                )

    def _note_exit(self, rank: int, child: ChildProcess, how: ChildExit) -> None:
        """On the supervisor's thread, which must not wait."""
        self._channels.post(partial(self._lose, rank, how))

    def _command(self, rank: int, channel: int, rendezvous: int) -> ChildCommand:
        label = self._label(rank)
        # Every replica is taken to be on this host, as its devices and cores are shared out.
        arguments = ["--rank", str(rank), "--local-rank", str(self._global(rank)), "--label", label]
        arguments += ["--channel", str(channel), "--rendezvous", str(rendezvous), "--log-level", _log_level()]
        return ChildCommand(
            module="fourfold_executor_mp.rank",
            label=f"{ROLE} {label}",
            arguments=arguments,
            pass_fds=(channel, rendezvous),
        )

    def _start_workers(self, context: ExecutorContext) -> None:
        started = time.monotonic()
        timeout = context.config.timeouts.startup_timeout
        message = StartMessage(
            config=encode_config(context.config),
            layout=context.layout,
            worker=context.worker,
            dp_rank=context.dp_rank,
            store_timeout=timeout,
        )
        payload = msgspec.msgpack.encode(message)
        replies = self._channels.send(DISCOVERY, payload, timeout=timeout, shape=_as_they_came).wait()
        compare_all([msgspec.msgpack.decode(reply, type=Fingerprint) for reply in replies])
        left = max(0.0, started + timeout - time.monotonic())
        self._channels.send(CONSTRUCTION, b"", timeout=left, shape=_as_they_came).wait()
        logger.info("%d rank(s) started in %.1f s", self.world_size, time.monotonic() - started)

    # --- failure, on the thread of the channels --------------------------------------------------------------------

    def _lose(self, rank: int, how: ChildExit) -> None:
        """A rank's process has ended."""
        self._channels.drain(rank)  # what it said last may tell more
        phase = self._channels.phase(rank)
        self._fail(ExecutorFailed(f"rank {rank} {how} {f'during {phase}' if phase else 'while idle'}", rank=rank))

    def _break(self, error: BaseException) -> None:
        self._fail(ExecutorFailed(f"calls reach the ranks no more after {type(error).__name__}: {error}"))

    def _fail(self, failure: ExecutorFailed) -> None:
        with self._state:
            if self._closed or self._failure is not None:
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
        self._channels.stop(
            lambda name: ExecutorFailed(f"{name!r} was called, but the executor has failed: {failure}"),
            partial(_cause, failure),
        )
        logger.error("%s%s", failure, "; the other ranks are ended" if self.world_size > 1 else "")
        for child in self._children:
            child.send_signal(signal.SIGKILL)  # they may wait for the lost one for good
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                logger.exception("a callback for failures failed")

    # --- names ---------------------------------------------------------------------------------------------------

    def _global(self, rank: int) -> int:
        return self._dp_rank * self.world_size + rank

    def _label(self, rank: int) -> str:
        return self._layout.label(self._global(rank))

    def _describe(self, rank: int) -> str:
        pid = f", pid {self._children[rank].pid}" if rank < len(self._children) else ""
        return f"rank {rank} ({self._label(rank)}{pid})"


def _log_level() -> str:
    """The name of this process' level, so that ranks say as much; info where it has none."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    return level.lower() if level in logging.getLevelNamesMapping() else "info"


def _cause(failure: ExecutorFailed, call: Call) -> EngineError:
    """What a call ends with: its own error if the lost rank itself said why, for others' errors may be mere echoes."""
    if isinstance(call.error, WorkerError) and call.error.rank == failure.rank:
        return call.error
    return ExecutorFailed(str(failure), rank=failure.rank)


def _shape(speaker: int | None, aggregate: Aggregate | None, replies: Replies) -> Any:
    """What ``collective_rpc`` returns for these replies."""
    if speaker is not None:
        return _decoded(replies[speaker])
    values = [_decoded(reply) for reply in replies]
    return values if aggregate is None else aggregate(values)


def _decoded(reply: bytes | bytearray | None) -> Any:
    return None if reply is None else decode(reply)


def _as_they_came(replies: Replies) -> Any:
    return replies
