"""Signals that ask a process to end, from before it has an event loop. Does not know what ends, or how."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndSignals:
    """Counts them from its making on, until somebody listens. Belongs to the main thread."""

    def __init__(self) -> None:
        self._count = 0
        # nohup ignores SIGHUP on purpose; shells ignore SIGINT of jobs behind &, but whoever sends it means it.
        self._heard = [
            signum for signum in _SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
        ]
        for signum in self._heard:
            signal.signal(signum, self._note)

    def listen(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on the loop at each signal; at once for each that has come before."""
        for signum in self._heard:
            loop.add_signal_handler(signum, callback)
        for _ in range(self._count):
            callback()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
