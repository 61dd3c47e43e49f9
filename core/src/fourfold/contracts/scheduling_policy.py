"""The scheduling-policy contract: in which order waiting requests are admitted and running ones are preempted."""

from __future__ import annotations

from typing import Protocol


class Schedulable(Protocol):
    """What a policy may look at."""

    @property
    def priority(self) -> int:
        """Lower runs first."""

    @property
    def arrival_time(self) -> float: ...

    @property
    def request_id(self) -> str: ...


class SchedulingPolicy(Protocol):
    """A total order on requests."""

    def key(self, request: Schedulable) -> tuple[float, ...]:
        """Sort key: the smallest is admitted first, the largest is preempted first. Constant for a request's life."""
