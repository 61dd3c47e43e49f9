"""The two scheduling policies of core. They see a request's priority and arrival, nothing of the cache or the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.contracts.scheduling_policy import Schedulable
    from fourfold.entries import SchedulerContext


class FirstComeFirstServed:
    """In order of arrival."""

    def __init__(self, context: SchedulerContext) -> None:
        del context  # nothing to configure

    def key(self, request: Schedulable) -> tuple[float, ...]:
        """Earlier arrivals first."""
        return (request.arrival_time,)


class PriorityFirst:
    """Lowest priority number first, equal ones in order of arrival."""

    def __init__(self, context: SchedulerContext) -> None:
        del context  # nothing to configure

    def key(self, request: Schedulable) -> tuple[float, ...]:
        """Lower priority numbers first, then earlier arrivals."""
        return (request.priority, request.arrival_time)
