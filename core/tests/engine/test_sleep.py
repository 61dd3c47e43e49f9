"""Sleep, waking and new weights of a core: what waits goes on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.engine.operations import OPERATIONS, sleep_calls, update_calls, wake_calls
from fourfold.errors import CheckpointError, EngineError, RequestError
from fourfold.sleep_tags import KV_CACHE, TAGS, WEIGHTS


def operate(engine: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """As the loop does: what the steps in the air bring is not lost."""
    for method, arguments in calls:
        if OPERATIONS[method]:
            for outputs in engine.core.settle():
                for output in outputs[0]:
                    engine.outputs[output.request_id].append(output)
        getattr(engine.core, method)(**arguments)


@pytest.mark.parametrize(("depth", "stages"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize(
    "calls", [[*sleep_calls(1), *wake_calls(())], [*sleep_calls(2), *wake_calls(())], update_calls("new")]
)
def test_running_requests_are_computed_again_and_end_alike(
    toy_engine: Any, depth: int, stages: int, calls: Any
) -> None:
    engine = toy_engine(depth=depth, pipeline_parallel_size=stages)
    names = [engine.add([3 + number] * 20, max_tokens=30) for number in range(6)]
    for _ in range(7):
        engine.step()
    operate(engine, calls)
    assert engine.core.stats.num_running == 0
    assert engine.core.stats.num_waiting > 0
    engine.run()
    for name in names:
        engine.check_finished(name)
    engine.check_idle()


def test_asleep_nothing_runs_and_nobody_is_taken(toy_engine: Any) -> None:
    engine = toy_engine()
    name = engine.add([3] * 20)
    engine.step()
    operate(engine, sleep_calls(1))
    stats = engine.core.stats
    assert (stats.asleep, stats.state_changes, engine.core.has_work) == (TAGS, 1, False)
    assert engine.core.step() == {}
    _, refusal = engine.try_add([4] * 3)
    assert (refusal.error_status, refusal.error) == (503, "the engine is asleep (weights, kv_cache); wake it up first")
    elsewhere = engine.add([5] * 3, output=[6])  # another engine died with it: it waits
    operate(engine, wake_calls([WEIGHTS]))
    assert (engine.core.stats.asleep, engine.core.has_work) == ((KV_CACHE,), False)
    operate(engine, wake_calls([WEIGHTS]))
    operate(engine, wake_calls([KV_CACHE]))
    assert engine.client.operations == ["sleep 1", "wake_up weights", "wake_up kv_cache complete"]
    engine.run()
    engine.check_finished(name)
    assert engine.finish_reason(elsewhere) is not None
    engine.check_idle()


def test_nothing_is_computed_with_weights_that_are_gone(toy_engine: Any) -> None:
    engine = toy_engine()
    name = engine.add([3] * 20)
    engine.step()
    operate(engine, update_calls("new")[:2])  # whoever wanted others is no more
    with pytest.raises(RequestError, match="the weights are gone and no others have come; update_weights brings some"):
        operate(engine, wake_calls(()))
    engine.core.resume()
    assert (engine.core.has_work, engine.core.stats.paused) == (False, False)
    operate(engine, update_calls("new"))
    engine.run()
    engine.check_finished(name)


def test_cached_prefixes_do_not_outlive_their_weights(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.add([3] * 40)
    engine.run()
    hits = engine.core.stats.prefix_cache_hits
    operate(engine, update_calls("new"))
    engine.add([3] * 40)
    engine.run()
    assert engine.core.stats.prefix_cache_hits == hits
    assert engine.client.operations == ["discard", "load new"]


def test_weights_that_cannot_be_read_sleep_until_others_can(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.client.operation_error = CheckpointError("truncated")
    operate(engine, update_calls("bad")[:1])
    with pytest.raises(CheckpointError, match="truncated"):
        engine.core.load_weights("bad")
    assert engine.core.stats.asleep == (WEIGHTS,)
    with pytest.raises(CheckpointError, match="truncated"):
        engine.core.wake_up()
    assert engine.core.stats.asleep == (WEIGHTS,)
    engine.client.operation_error = None
    operate(engine, update_calls("good"))
    assert engine.core.stats.asleep == ()
    assert engine.client.operations[-3:] == ["discard", "load good", "wake_up  complete"]
    name = engine.add([3] * 4)
    engine.run()
    engine.check_finished(name)


def test_wrong_levels_tags_and_times_are_refused(toy_engine: Any) -> None:
    engine = toy_engine(depth=3)
    with pytest.raises(RequestError, match="level is 3; 1 keeps"):
        engine.core.sleep(3)
    with pytest.raises(RequestError, match="no tag 'kv'; there are weights and kv_cache"):
        engine.core.wake_up(["kv"])
    engine.core.wake_up()
    engine.add([3] * 4, max_tokens=20)
    engine.step()
    with pytest.raises(EngineError, match="2 steps are in the air; settle them first"):
        engine.core.halt()


def paused(engine: Any, mode: str) -> list[str]:
    """Pause as the loop does; returns the requests that ended because of it."""
    ended = [output.request_id for group in engine.core.pause(mode).values() for output in group]
    while engine.core.has_work:
        for output in engine.core.step().get(0, []):
            engine.outputs[output.request_id].append(output)
    engine.core.confirm_pause()
    return ended


@pytest.mark.parametrize("depth", [1, 3])
def test_what_a_pause_keeps_goes_on_after_it(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth)
    name = engine.add([3] * 20, max_tokens=30)
    for _ in range(5):
        engine.step()
    assert paused(engine, "keep") == []
    assert (engine.core.stats.paused, engine.core.stats.num_running) == (True, 1)
    later = engine.add([4] * 5)
    assert (engine.core.has_work, engine.core.step()) == (False, {})
    engine.core.resume()
    assert not engine.core.stats.paused
    engine.run()
    for each in (name, later):
        engine.check_finished(each)
    engine.check_idle()


def test_a_pause_waits_for_what_has_begun_and_preempted_it_may_be(toy_engine: Any) -> None:
    engine = toy_engine(depth=2)
    begun = [engine.add([3 + number] * 20, max_tokens=30) for number in range(2)]
    for _ in range(3):
        engine.step()
    for outputs in engine.core.settle():
        for output in outputs[0]:
            engine.outputs[output.request_id].append(output)
    engine.core.halt()  # which preempts both
    engine.core.wake_up()
    later = engine.add([9] * 4)
    assert paused(engine, "wait") == []
    for each in begun:
        engine.check_finished(each)
    assert (engine.core.stats.num_running, engine.core.stats.num_waiting) == (0, 1)
    engine.core.resume()
    engine.run()
    engine.check_finished(later)
    engine.check_idle()


def test_a_pause_may_end_everything(toy_engine: Any) -> None:
    engine = toy_engine(depth=3)
    names = [engine.add([3 + number] * 20, max_tokens=30) for number in range(3)]
    engine.step()
    assert sorted(paused(engine, "abort")) == sorted(names)
    engine.core.resume()
    engine.check_idle()
    with pytest.raises(RequestError, match="mode is 'stop'; there are abort, wait, keep"):
        engine.core.pause("stop")
