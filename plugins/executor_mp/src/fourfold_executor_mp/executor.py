"""Gives every rank of one engine a fresh interpreter on this host. Fails as one: if a rank is lost, the others end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import msgspec

from fourfold.config.transport import encode_config
from fourfold.entries import ExecutorContext
from fourfold.errors import EngineError, ExecutorClosed, ExecutorFailed, WorkerError
from fourfold.executor_shell import ExecutorShell
from fourfold.manifest import Fingerprint, compare_all
from fourfold.rpc_call import RpcCall
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


class MpExecutor(ExecutorShell):
    """A process per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Start all ranks at once and wait until each has built its worker.

        Raises WorkerError or ExecutorFailed for a rank that cannot, PluginError and ConfigError for ranks that differ,
        RpcTimeout past --startup-timeout; no process is left then.
        """
        super().__init__(context)
        self._layout = context.layout
        self._dp_rank = context.dp_rank
        self._down = threading.Event()
        self._children: list[ChildProcess] = []
        streams = [socket.socketpair() for _ in range(self.world_size)]
        self._channels = Channels([ours for ours, _ in streams], describe=self._describe, on_broken=self._break)
        self._supervisor = ChildSupervisor(stall_timeout=self._timeouts.stall_timeout)
        try:
            self._start_ranks([theirs for _, theirs in streams])
            self._start_workers(context)
        except BaseException:
            self.shutdown()
            raise

    @property
    def max_in_flight(self) -> int:
        """A step for every stage of the pipeline, and one that waits for them."""
        return self._layout.pp + 1

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs."""
        rows = []
        for rank, child in enumerate(self._children):
            with contextlib.suppress(ProcessLookupError):
                rows.append(msgspec.to_builtins(process_state(ROLE, self._label(rank), "running", pid=child.pid)))
        return rows

    def shutdown(self) -> None:
        """End all ranks; idempotent, from any thread. Calls on their way end with ExecutorClosed."""
        if not self._close():
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

    def _call(self, call: RpcCall) -> Any:
        if self._channels.on_thread:
            raise EngineError(
                f"{call.name!r} was called by a future's callback or fold, and no reply comes before that returns; "
                "call it with non_block, or on another thread"
            )
        # Shaped here, since a large reply takes long to read and the listening thread has others to serve.
        return call.result(self._send(call, _as_they_came).wait())

    def _start(self, call: RpcCall) -> Future[Any]:
        return self._send(call, call.result).future

    def _send(self, call: RpcCall, shape: Callable[[Replies], Any]) -> Call:
        return self._channels.send(call.name, call.encoded(), timeout=call.timeout, shape=shape)

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
        place = f"during {phase}" if phase else "while idle"
        failure = ExecutorFailed(f"rank {rank} {how} {place}", rank=rank)
        self._fail(failure, first=partial(self._end_ranks, failure))

    def _break(self, error: BaseException) -> None:
        failure = ExecutorFailed(f"calls reach the ranks no more after {type(error).__name__}: {error}")
        self._fail(failure, first=partial(self._end_ranks, failure))

    def _end_ranks(self, failure: ExecutorFailed) -> None:
        self._channels.stop(lambda name: self._refusal(name, failure), partial(_cause, failure))
        logger.error("%s%s", failure, "; the other ranks are ended" if self.world_size > 1 else "")
        for child in self._children:
            child.send_signal(signal.SIGKILL)  # they may wait for the lost one for good

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


def _as_they_came(replies: Replies) -> Any:
    return replies
