"""One call on its way: which ranks have yet to answer, what came back, how it ends. Knows no socket and no thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from fourfold.errors import EngineError, RpcTimeout
from fourfold.rpc.frames import Frame, Kind
from fourfold.rpc_call import Reply, read_error

SETTLE_SECONDS: Final = 0.1
"""How long an error waits for the other ranks: it may be the echo of a rank's death, which is told a moment later."""
_PATIENCE: Final = 5.0
"""Seconds beyond the deadline of a call after which a caller no longer counts on being told."""

Replies = list[Reply]
"""One a rank, in rank order."""


class Call:
    """Whoever has the lock of the channels changes it; once it is settled, its end is ``resolve``'s."""

    def __init__(
        self,
        number: int,
        name: str,
        *,
        ranks: int,
        timeout: float,
        notice: float,
        now: float,
        shape: Callable[[Replies], Any],
    ) -> None:
        """``notice``: seconds of waiting between two notices. ``shape`` makes the result of the replies."""
        self.name = name
        self.number = number
        self.started = now
        self.deadline = now + timeout
        self.missing = set(range(ranks))
        self.settled = False
        """Whether its end is decided; answers that are still to come change nothing."""
        self.future: Future[Any] = Future()
        self._timeout = timeout
        self._shape = shape
        self._replies: Replies = [None] * ranks
        self._error: EngineError | None = None
        self._decide_at = self.deadline
        self._notice = notice
        self._notice_at = now + notice

    @property
    def error(self) -> EngineError | None:
        """What it ends with, as far as is known."""
        return self._error

    @property
    def wake_time(self) -> float:
        """When ``settle_overdue`` or ``notice_due`` has something to say."""
        return min(self._decide_at, self._notice_at)

    def take(self, rank: int, frame: Frame, now: float) -> None:
        """A rank's answer."""
        self.missing.discard(rank)
        if frame.kind == Kind.REPLY:
            self._replies[rank] = frame.payload
        elif frame.kind == Kind.ERROR and self._error is None:
            self._error = read_error(frame.payload, rank=rank)
            self._decide_at = min(self.deadline, now + SETTLE_SECONDS)
        self.settled = self.settled or not self.missing

    def notice_due(self, now: float) -> bool:
        """Whether it is time to say for whom it waits; true once each time."""
        if now < self._notice_at:
            return False
        self._notice_at = now + self._notice
        return True

    def settle_overdue(self, now: float) -> None:
        """End it if a deadline has passed: with the error that it has, or with the ranks that are missing."""
        if now < self._decide_at:
            return
        if self._error is None:
            self._error = RpcTimeout(self.name, self._timeout, sorted(self.missing))
        self.settled = True

    def settle_with(self, error: EngineError) -> None:
        """End it with an error."""
        self._error = error
        self.settled = True

    def resolve(self) -> None:
        """Tell whoever waits; not under the lock, since ``shape`` and callbacks of the future run here."""
        if not self.future.set_running_or_notify_cancel():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        try:
            result = self._shape(self._replies)
        except Exception as error:  # of a fold, or of bytes that cannot be read: the caller's to see
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def wait(self) -> Any:
        """The result; raises what it ended with."""
        try:
            return self.future.result(self._timeout + _PATIENCE)
        except TimeoutError as error:
            if self.future.done():
                raise
            raise RpcTimeout(self.name, self._timeout, sorted(self.missing)) from error
