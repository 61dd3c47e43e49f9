"""What executors have in common whose ranks are processes at the other ends of streams. Knows not who starts them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import msgspec

from fourfold.config.transport import encode_config
from fourfold.entries import ExecutorContext
from fourfold.errors import EngineError, ExecutorClosed, ExecutorFailed, WorkerError
from fourfold.executor_shell import ExecutorShell
from fourfold.manifest import compare_all
from fourfold.rpc.call import Call, Replies
from fourfold.rpc.channels import Channels, NodeWay
from fourfold.rpc.start_message import CONSTRUCTION, DISCOVERY, Introduction, StartMessage
from fourfold.rpc_call import RpcCall

logger = logging.getLogger(__name__)

ROLE: Final = "worker"
"""Of a rank's process, in titles, logs and ``/topology``."""
_GRACE: Final = 2.0
"""Seconds for idle ranks to let their workers go; an engine itself has 5."""
_BUSY_GRACE: Final = 0.5
"""The same for ranks in the middle of a call, which may wait for a rank that failed and would never come back."""
_SHUTDOWN_TIMEOUT: Final = 15.0
"""Seconds that a second caller of ``shutdown`` waits for the first."""


class RankExecutor(ExecutorShell):
    """See ``fourfold.contracts.executor.Executor``. Fails as one: if a rank is lost, the others end.

    A backend starts a ``RankServer`` for every rank, then calls ``_connect`` and ``_start_workers``; it posts ``_lose``
    when a rank ends, and calls ``shutdown`` if anything goes wrong meanwhile.
    """

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._layout = context.layout
        self._dp_rank = context.dp_rank
        self._down = threading.Event()
        self._channels: Channels | None = None

    @property
    def max_in_flight(self) -> int:
        """A step for every stage of the pipeline, and one that waits for them."""
        return self._layout.pp + 1

    def shutdown(self) -> None:
        """End all ranks; idempotent, from any thread. Calls on their way end with ExecutorClosed."""
        channels = self._channels
        if not self._close():
            if channels is None or not channels.on_thread:
                self._down.wait(_SHUTDOWN_TIMEOUT)
            return
        try:
            busy = channels is not None and channels.stop(
                lambda name: ExecutorClosed(f"{name!r} was called after shutdown"),
                lambda call: ExecutorClosed(f"{call.name!r} was on its way at shutdown"),
            )
            self._end_ranks(_BUSY_GRACE if busy else _GRACE)
            if channels is not None:
                channels.close()
        finally:
            self._down.set()

    @abstractmethod
    def _end_ranks(self, grace: float) -> None:
        """End all ranks, and wait for their end; they may take ``grace`` seconds to let their workers go."""

    @abstractmethod
    def _kill_ranks(self) -> None:
        """End all ranks at once, and wait for nothing."""

    @abstractmethod
    def _describe(self, rank: int) -> str:
        """A rank as the log calls it."""

    def _call(self, call: RpcCall) -> Any:
        if self._open_channels.on_thread:
            raise EngineError(
                f"{call.name!r} was called by a future's callback or fold, and no reply comes before that returns; "
                "call it with non_block, or on another thread"
            )
        # Shaped here, since a large reply takes long to read and the listening thread has others to serve.
        return call.result(self._send(call, _as_they_came).wait())

    def _start(self, call: RpcCall) -> Future[Any]:
        return self._send(call, call.result).future

    def _send(self, call: RpcCall, shape: Callable[[Replies], Any]) -> Call:
        return self._open_channels.send(call.name, call.encoded(), timeout=call.timeout, shape=shape)

    @property
    def _open_channels(self) -> Channels:
        if self._channels is None:
            raise ExecutorClosed("no rank is connected")
        return self._channels

    # --- start ---------------------------------------------------------------------------------------------------

    def _connect(
        self,
        streams: Mapping[int, socket.socket],
        *,
        nodes: Sequence[NodeWay] = (),
        on_end: Callable[[int], None] | None = None,
    ) -> Channels:
        """Take over the executor's ends of the streams; the rest as ``Channels`` takes it."""
        self._channels = Channels(streams, nodes=nodes, describe=self._describe, on_broken=self._break, on_end=on_end)
        return self._channels

    def _start_workers(self, context: ExecutorContext, *, rendezvous: str, started: float) -> None:
        """Compare what the ranks are, and let each build its worker; ``started`` counts for --startup-timeout.

        ``rendezvous`` is where ranks meet before they can talk, as ``fourfold.distributed.store`` takes it; empty: the
        first rank makes a place that the others reach over the network.
        """
        timeout = context.config.timeouts.startup_timeout
        message = StartMessage(
            config=encode_config(context.config),
            layout=context.layout,
            worker=context.worker,
            dp_rank=context.dp_rank,
            store_timeout=timeout,
            several_nodes=not rendezvous,
        )

        def ask(what: str, payload: bytes) -> Replies:
            left = max(0.0, started + timeout - time.monotonic())
            call = self._open_channels.send(what, payload, timeout=left, shape=_as_they_came)
            replies: Replies = call.wait()
            return replies

        replies = ask(DISCOVERY, msgspec.msgpack.encode(message))
        ranks = [msgspec.msgpack.decode(reply or b"", type=Introduction) for reply in replies]
        compare_all([rank.fingerprint for rank in ranks])
        ask(CONSTRUCTION, (rendezvous or ranks[0].rendezvous).encode())
        logger.info("%d rank(s) started in %.1f s", self.world_size, time.monotonic() - started)

    # --- failure, on the thread of the channels --------------------------------------------------------------------

    def _lose(self, rank: int, how: str, *, why: str = "") -> None:
        """A rank's process has ended. Only on the thread, by ``Channels.post``."""
        channels = self._open_channels
        channels.drain(rank)  # what it said last may tell more
        phase = channels.phase(rank)
        place = f"during {phase}" if phase else "while idle"
        cause = f": {why}" if why else ""
        failure = ExecutorFailed(f"{self._name(rank)} {how} {place}{cause}", rank=rank)
        self._fail(failure, first=partial(self._end_with, failure))

    def _break(self, error: BaseException) -> None:
        failure = ExecutorFailed(f"calls reach the ranks no more after {type(error).__name__}: {error}")
        self._fail(failure, first=partial(self._end_with, failure))

    def _end_with(self, failure: ExecutorFailed) -> None:
        self._open_channels.stop(lambda name: self._refusal(name, failure), partial(_cause, failure))
        logger.error("%s%s", failure, "; the other ranks are ended" if self.world_size > 1 else "")
        self._kill_ranks()  # they may wait for the lost one for good

    # --- names ---------------------------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        """A rank as failures call it."""
        return f"rank {rank}"

    def _global(self, rank: int) -> int:
        return self._dp_rank * self.world_size + rank

    def _label(self, rank: int) -> str:
        return self._layout.label(self._global(rank))


def log_level() -> str:
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
