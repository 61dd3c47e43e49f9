"""Shows how far a long start-up task is: a bar on a terminal, plain log lines elsewhere. Knows no checkpoint."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

_log = logging.getLogger(__name__)
_LINES_PER_TASK = 4


class Progress(Protocol):
    """One task at a time; a new one ends the one before."""

    def task(self, name: str, total: int) -> None:
        """Start ``name``, done after ``total`` steps."""

    def advance(self, steps: int) -> None:
        """``steps`` more are done."""

    def close(self) -> None:
        """Stop showing anything; idempotent."""


class NoProgress:
    """Shows nothing."""

    def task(self, name: str, total: int) -> None:
        """Nothing."""

    def advance(self, steps: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LogProgress:
    """A log line at the start of a task and at every quarter of it."""

    def __init__(self, logger: logging.Logger = _log) -> None:
        self._logger = logger
        self._name = ""
        self._total = 0
        self._done = 0

    def task(self, name: str, total: int) -> None:
        """One line."""
        self._name, self._total, self._done = name, total, 0
        self._logger.info("%s: started", name)

    def advance(self, steps: int) -> None:
        """A line when a quarter is passed."""
        if not self._total:
            return
        before = self._done * _LINES_PER_TASK // self._total
        self._done += steps
        after = self._done * _LINES_PER_TASK // self._total
        if after > before:
            self._logger.info("%s: %d of %d", self._name, self._done, self._total)

    def close(self) -> None:
        """Nothing is open."""


class RichProgress:
    """A bar on standard error, gone when it is done."""

    def __init__(self) -> None:
        self._bars: RichBars | None = None
        self._task: TaskID | None = None

    def task(self, name: str, total: int) -> None:
        """Replace the bar."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.close()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bars.start()
        self._task = self._bars.add_task(name, total=total)

    def advance(self, steps: int) -> None:
        """Move the bar."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, steps)

    def close(self) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def make_progress() -> Progress:
    """A bar where standard error is a terminal, log lines elsewhere."""
    return RichProgress() if sys.stderr.isatty() else LogProgress()
