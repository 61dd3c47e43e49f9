"""One place in a deployment, held by one process after another. Starts nothing and waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.messages import EngineFailed
from fourfold.process_messages import ProcessFailed
from fourfold.supervision.child_process import ChildExit, ChildProcess

RAPID_CRASH_SECONDS = 60.0
"""A process that dies sooner than this after its start counts as crashing rapidly."""
MAX_DELAY = 30.0
"""Seconds between two starts at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the deployment ends."""

    message: str
    status: int
    """The exit status that says so: 2 when config, checkpoint or plugins are at fault, else 1."""
    traceback: str = ""
    immediate: bool = False
    """Whether nothing is waited for any more."""


@dataclass(kw_only=True, slots=True, eq=False)
class SupervisedProcess:
    """What is known of an engine, an API server or the coordinator over its incarnations."""

    role: str
    index: int
    label: str
    incarnation: int = 0
    child: ChildProcess | None = None
    started: float = 0.0
    """Monotonic time of the present incarnation's start."""
    ready: bool = False
    ever_ready: bool = False
    start_failure: str = ""
    """Why the last start failed of one that was ready before; empty once it is ready again."""
    planned_end: bool = False
    """Whether it ends because somebody wanted it restarted."""
    last_word: EngineFailed | ProcessFailed | None = None
    overdue: str = ""
    """Why the supervisor ended it."""
    rapid_crashes: int = 0
    failed_starts: int = 0
    """In a row, of one that was ready before."""
    wake_time: float | None = None
    """When to look again: the deadline of a start or of a drain, or the time of a restart."""
    on_wake: Callable[[], None] = field(default=lambda: None)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.role} {self.label}".rstrip()

    def begin(self) -> None:
        """A new incarnation is about to start."""
        self.incarnation += 1
        self.ready, self.planned_end, self.last_word, self.overdue = False, False, None, ""
        self.started = time.monotonic()

    def wake_at(self, when: float, callback: Callable[[], None]) -> None:
        """Have ``callback`` called at a monotonic time, in place of what was to be called before."""
        self.wake_time, self.on_wake = when, callback

    def explain(self, how: ChildExit) -> Failure:
        """Why it ended."""
        phase = "while running" if self.ready else "during start-up"
        if self.overdue:
            return Failure(message=f"{self.name} {self.overdue}", status=1)
        if self.last_word is None:
            return Failure(message=f"{self.name} {how} {phase}", status=1)
        return self.explain_word(self.last_word)

    def explain_word(self, word: EngineFailed | ProcessFailed) -> Failure:
        """Why it is about to end, as it says itself."""
        if word.refused:
            return Failure(message=word.message, status=2)
        phase = "while running" if self.ready else "during start-up"
        message = f"{self.name} failed {phase}: {word.message}"
        return Failure(message=message, status=1, traceback=word.traceback)

    def count_crash(self) -> float:
        """Note that it ended by itself; returns the seconds to wait before the next start.

        The first restart is at once; a place that goes on failing backs off 1, 2, ... seconds. A start that fails is a
        rapid crash however long it took.
        """
        self.failed_starts += not self.ready
        rapid = not self.ready or time.monotonic() - self.started < RAPID_CRASH_SECONDS
        self.rapid_crashes = self.rapid_crashes + 1 if rapid else 1
        return 0.0 if self.rapid_crashes == 1 else min(MAX_DELAY, 2.0 ** (self.rapid_crashes - 2))
