"""How busy the stages of a pipeline are, and what their layers count: asks them now and then, without waiting, while
steps are in the air.
"""

from __future__ import annotations

from concurrent.futures import Future
from time import perf_counter
from typing import Final, Protocol

from fourfold.messages import EngineStats, StageFigures

STEPS_BETWEEN: Final = 32
"""Steps from one question to the next; counted, not timed, so that ranks with an engine each ask alike."""


class StageClient(Protocol):
    """Whom to ask."""

    def stage_figures(self) -> Future[list[StageFigures]]:
        """What each stage says of itself."""


class StageWatch:
    """Writes what it learns into the engine's stats."""

    def __init__(self, client: StageClient, stats: EngineStats) -> None:
        self._client = client
        self._stats = stats
        self._num_steps = 0
        self._seconds = 0.0
        """With steps in the air, so far."""
        self._counted_until: float | None = None
        self._reply: Future[list[StageFigures]] | None = None
        self._asked_at = 0.0

    def step_returned(self, *, started: float, air_is_empty: bool) -> None:
        """Count a step; ``started`` is the ``perf_counter`` of when the engine began to send or to wait for it."""
        now = perf_counter()
        self._seconds += now - (started if self._counted_until is None else self._counted_until)
        self._counted_until = None if air_is_empty else now
        self._num_steps += 1
        if self._reply is not None and self._reply.done():
            self._take(self._reply)
            self._reply = None
        if self._num_steps % STEPS_BETWEEN == 0 and self._reply is None:
            self._asked_at = self._seconds
            self._reply = self._client.stage_figures()

    def _take(self, reply: Future[list[StageFigures]]) -> None:
        if reply.exception() is not None:  # what breaks the workers breaks steps too, and is reported there
            return
        stats, figures = self._stats, reply.result()
        busy = [stage.busy_seconds for stage in figures]
        elapsed = self._asked_at - stats.pipeline_seconds
        before = stats.stage_busy_seconds or [0.0] * len(busy)
        stats.stage_bubble_shares = [
            min(max(1 - (after - earlier) / elapsed, 0.0), 1.0) for after, earlier in zip(busy, before)
        ]
        stats.stage_busy_seconds, stats.pipeline_seconds = busy, self._asked_at
        if any(stage.counters for stage in figures):
            stats.layer_counters = [stage.counters for stage in figures]
