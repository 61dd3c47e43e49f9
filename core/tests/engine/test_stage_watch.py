from __future__ import annotations

from concurrent.futures import Future
from time import perf_counter

import pytest

from fourfold.engine.stage_watch import STEPS_BETWEEN, StageWatch
from fourfold.errors import ExecutorFailed
from fourfold.messages import EngineStats, StageFigures


class Client:
    def __init__(self) -> None:
        self.asked: list[Future[list[StageFigures]]] = []

    def stage_figures(self) -> Future[list[StageFigures]]:
        self.asked.append(Future())
        return self.asked[-1]


def figures(*busy_seconds: float) -> list[StageFigures]:
    return [StageFigures(busy_seconds=seconds, counters={}) for seconds in busy_seconds]


def run(watch: StageWatch, steps: int, *, seconds: float) -> None:
    """Steps that began ``seconds`` ago, one after another."""
    for _ in range(steps):
        watch.step_returned(started=perf_counter() - seconds, air_is_empty=True)


def test_shares_are_of_the_time_between_two_questions() -> None:
    client, stats = Client(), EngineStats()
    watch = StageWatch(client, stats)
    run(watch, STEPS_BETWEEN - 1, seconds=1.0)
    assert client.asked == []
    run(watch, 1, seconds=1.0)
    client.asked[0].set_result(figures(16.0, 32.0))
    run(watch, STEPS_BETWEEN, seconds=0.5)
    assert stats.pipeline_seconds == pytest.approx(STEPS_BETWEEN, rel=0.01)
    assert stats.stage_busy_seconds == [16.0, 32.0]
    assert stats.stage_bubble_shares == pytest.approx([0.5, 0.0], abs=0.01)
    client.asked[1].set_result(figures(28.0, 36.0))
    run(watch, 1, seconds=0.0)
    assert stats.stage_bubble_shares == pytest.approx([0.25, 0.75], abs=0.01)


def test_layers_of_every_stage_are_counted_also_where_the_last_has_none_that_count() -> None:
    client, stats = Client(), EngineStats()
    watch = StageWatch(client, stats)
    run(watch, STEPS_BETWEEN, seconds=0.1)
    client.asked[0].set_result(figures(1.0, 1.0))
    run(watch, STEPS_BETWEEN, seconds=0.1)
    assert stats.layer_counters == []
    counted = [{"expert_moves": 3.0}, {}]
    client.asked[1].set_result([StageFigures(busy_seconds=2.0, counters=counters) for counters in counted])
    run(watch, 1, seconds=0.1)
    assert stats.layer_counters == counted


def test_nothing_is_asked_twice_and_a_failure_is_left_to_the_steps() -> None:
    client, stats = Client(), EngineStats()
    watch = StageWatch(client, stats)
    run(watch, 3 * STEPS_BETWEEN, seconds=0.1)
    assert len(client.asked) == 1
    client.asked[0].set_exception(ExecutorFailed("gone"))
    run(watch, STEPS_BETWEEN, seconds=0.1)
    assert len(client.asked) == 2
    assert stats.stage_busy_seconds == []


def test_time_between_steps_counts_while_something_is_in_the_air() -> None:
    client, stats = Client(), EngineStats()
    watch = StageWatch(client, stats)
    begun = perf_counter()
    for _ in range(STEPS_BETWEEN):
        watch.step_returned(started=perf_counter(), air_is_empty=False)
    elapsed = perf_counter() - begun
    client.asked[0].set_result(figures(0.0))
    watch.step_returned(started=perf_counter(), air_is_empty=False)
    assert 0 < stats.pipeline_seconds <= elapsed
