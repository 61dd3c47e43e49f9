"""Which processes a signal such as SIGSTOP has stopped, and for how long. Knows neither children nor ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_LONGEST: Final = 5.0
_STOPPED: Final = "T"
"""The state in /proc of a process that waits for SIGCONT; one that a debugger holds is in another."""


class StoppedProcesses:
    """Finds those that have been stopped for ``limit`` seconds; the time counts from the first look that saw it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.look_every = min(_LONGEST, limit / 4)
        """Seconds between two looks, for whoever looks."""
        self._since: dict[int, float] = {}

    def overdue(self, pids: Iterable[int]) -> list[int]:
        """Those of ``pids``, all that are watched, that are still stopped after the limit."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return [pid for pid, since in self._since.items() if now - since >= self.limit]

    def __str__(self) -> str:
        """What happened to one that is overdue, to follow its name."""
        return f"was stopped by a signal for {self.limit:g} s"


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or is not ours to see
        return False
    # The name before the state may hold spaces and brackets of its own.
    return stat.rpartition(") ")[2].startswith(_STOPPED)
