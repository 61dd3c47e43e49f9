"""What each step holds, in single situations; the storms cover the combinations."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from fourfold.messages import FinishReason


def _counts(engine: Any, step: int) -> list[int]:
    return [entry.num_tokens for entry in engine.client.messages[step].scheduled]


def test_one_budget_holds_decodes_first_then_chunks_and_new_requests(toy_engine: Any) -> None:
    engine = toy_engine(max_num_batched_tokens=16)
    engine.add([2] * 5, ignore_eos=True)
    engine.add([3] * 20, ignore_eos=True)
    engine.add([4] * 20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert [_counts(engine, step) for step in range(4)] == [[5, 11], [1, 9, 6], [1, 1, 14], [1, 1, 1]]
    samples = [[entry.samples for entry in message.scheduled] for message in engine.client.messages]
    assert samples == [[True, False], [True, True, False], [True, True, True], [True, True, True]]


def test_messages_carry_only_what_changed(toy_engine: Any) -> None:
    engine = toy_engine(block_size=8)
    name = engine.add([2] * 14, max_tokens=4, ignore_eos=True)
    engine.run()
    messages = engine.client.messages
    assert [[new.request_id for new in message.new] for message in messages] == [[name], [], [], []]
    assert [[len(entry.new_blocks[0]) for entry in message.scheduled] for message in messages] == [[2], [0], [0], [1]]
    assert [entry.reset_blocks for message in messages for entry in message.scheduled] == [True, False, False, False]


def test_a_slot_is_ended_before_it_is_used_again(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.add([2, 3], max_tokens=1)
    engine.run()
    engine.add([2, 3], max_tokens=1)
    engine.run()
    first, second = engine.client.messages
    assert second.ended == [first.new[0].slot]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_token_beyond_the_last_is_scheduled(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth)
    name = engine.add([2] * 5, max_tokens=7, ignore_eos=True)
    engine.run()
    engine.check_finished(name)
    assert sum(sum(_counts(engine, step)) for step in range(engine.client.steps)) == 5 + 7 - 1


def test_steps_overlap_before_values_are_known(toy_engine: Any) -> None:
    engine = toy_engine(depth=3)
    engine.add([2] * 5, max_tokens=9, ignore_eos=True)
    engine.run()
    assert engine.client.widest_overlap == 3


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_holds_a_request_in_one_step_at_a_time(toy_engine: Any, stages: int) -> None:
    engine = toy_engine(depth=stages, pipeline_parallel_size=stages, max_num_batched_tokens=64)
    names = [engine.add([number] * 3, ignore_eos=True) for number in range(3)]
    engine.run()
    assert engine.client.widest_overlap == 1
    for name in names:
        engine.check_finished(name)


def test_parts_of_a_prompt_follow_each_other_through_a_pipeline(toy_engine: Any) -> None:
    engine = toy_engine(depth=2, pipeline_parallel_size=2, max_num_batched_tokens=16)
    name = engine.add([3] * 40, ignore_eos=True)
    engine.run()
    assert engine.client.widest_overlap == 2
    assert [sum(_counts(engine, step)) for step in range(6)] == [8, 8, 8, 8, 8, 1]
    engine.check_finished(name)


@pytest.mark.parametrize(("stages", "requests"), [(2, 7), (2, 8), (3, 10), (4, 13)])
def test_batches_of_a_pipeline_are_even_however_requests_came(toy_engine: Any, stages: int, requests: int) -> None:
    engine = toy_engine(
        depth=stages, pipeline_parallel_size=stages, max_num_seqs=16, max_num_batched_tokens=128, num_blocks=200
    )
    for number in range(requests):
        engine.add([number], ignore_eos=True, max_tokens=60)
    for _ in range(4 * stages):
        engine.step()
    sizes = [len(message.scheduled) for message in engine.client.messages[-stages:]]
    assert sum(sizes) == requests
    assert max(sizes) - min(sizes) <= stages - 1
    assert max(sizes) == -(-requests // stages)
    engine.run()


def test_nobody_starves_in_uneven_batches(toy_engine: Any) -> None:
    engine = toy_engine(depth=3, pipeline_parallel_size=3, max_num_seqs=16, max_num_batched_tokens=128, num_blocks=400)
    names = [engine.add([number], ignore_eos=True, max_tokens=40) for number in range(9)]
    for _ in range(20):
        engine.step()
        if engine.client.steps in (5, 9, 14):  # arrivals that upset the balance
            engine.add([11], ignore_eos=True, max_tokens=3)
    lengths = [len(engine.tokens(name)) for name in names]
    assert max(lengths) - min(lengths) <= 2
    engine.run()


def test_the_end_of_the_context_is_length(toy_engine: Any) -> None:
    engine = toy_engine(max_model_len=32)
    name = engine.add([2] * 31, max_tokens=16)
    engine.run()
    assert len(engine.tokens(name)) == 1
    assert engine.finish_reason(name) is FinishReason.LENGTH


def test_a_request_that_fills_the_whole_cache_ends_with_length(toy_engine: Any) -> None:
    engine = toy_engine(num_blocks=4, block_size=8, max_model_len=128)
    name = engine.add([2] * 20, max_tokens=None, ignore_eos=True)
    engine.run()
    assert len(engine.tokens(name)) == 3 * 8 + 1 - 20, "the last token needs no place"
    assert engine.finish_reason(name) is FinishReason.LENGTH
    engine.check_idle()


def test_stop_tokens_end_a_request_and_are_named(toy_engine: Any) -> None:
    engine = toy_engine()
    name = engine.add([5, 6, 7], max_tokens=20, ignore_eos=True)
    engine.run()
    tokens = engine.tokens(name)
    stop = next(token for index, token in enumerate(tokens) if index and token not in tokens[:index])
    position = tokens.index(stop)
    stopped = engine.add([5, 6, 7], max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    reluctant = engine.add([5, 6, 7], max_tokens=20, ignore_eos=True, stop_token_ids=(stop,), min_tokens=position + 2)
    engine.run()
    assert engine.tokens(stopped) == tokens[: position + 1]
    assert engine.finish_reason(stopped) is FinishReason.STOP
    assert engine.outputs[stopped][-1].stop_token_id == stop
    assert len(engine.tokens(reluctant)) > position + 1
    engine.check_finished(reluctant)


def test_eos_ends_a_request_unless_ignored(toy_engine: Any) -> None:
    engine = toy_engine()
    prompts = [[number, 3, 9] for number in range(30)]
    names = [engine.add(prompt, max_tokens=30) for prompt in prompts]
    engine.run()
    ended = next(name for name in names if engine.finish_reason(name) is FinishReason.STOP)
    assert engine.outputs[ended][-1].stop_token_id is None
    ignoring = engine.add(list(engine.requests[ended].prompt_token_ids), max_tokens=30, ignore_eos=True)
    engine.run()
    assert len(engine.tokens(ignoring)) == 30


def test_a_full_hit_computes_the_last_token_again(toy_engine: Any) -> None:
    engine = toy_engine(block_size=8, max_num_batched_tokens=64)
    prompt = list(range(24))
    first = engine.add(prompt, ignore_eos=True)
    engine.run()
    again = engine.add(prompt, ignore_eos=True)
    engine.run()
    assert engine.tokens(first) == engine.tokens(again)
    assert engine.outputs[first][0].num_cached_tokens == 0
    assert engine.outputs[again][0].num_cached_tokens == 16
    assert [output.num_cached_tokens for output in engine.outputs[again][1:]] == [0] * 7
    assert (engine.core.stats.prefix_cache_hits, engine.core.stats.prefix_cache_queries) == (16, 48)


def test_output_is_shared_as_well_as_prompts(toy_engine: Any) -> None:
    engine = toy_engine(block_size=8, max_num_batched_tokens=64)
    first = engine.add(list(range(10)), max_tokens=20, ignore_eos=True)
    engine.run()
    follow_up = engine.add([*range(10), *engine.tokens(first), 5], ignore_eos=True)
    engine.run()
    assert engine.outputs[follow_up][0].num_cached_tokens == 24


def test_running_requests_share_a_prefix(toy_engine: Any) -> None:
    engine = toy_engine(num_blocks=8, block_size=8, max_num_batched_tokens=64)
    engine.add([2] * 33, max_tokens=4, ignore_eos=True)
    engine.step()
    engine.add([2] * 33, max_tokens=4, ignore_eos=True)
    engine.step()
    assert engine.core.stats.num_running == 2, "five blocks each would not fit seven"


def test_salts_and_disabled_caching_share_nothing(toy_engine: Any) -> None:
    for settings, salts in (({}, ("a", "b")), ({"prefix_caching": False}, ("", ""))):
        engine = toy_engine(**settings)
        for salt in salts:
            engine.add([2] * 20, salt=salt)
            engine.run()
        assert engine.core.stats.prefix_cache_hits == 0


def test_resetting_the_prefix_cache_forgets_it(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.add([2] * 20)
    engine.run()
    engine.core.reset_prefix_cache()
    engine.add([2] * 20)
    engine.run()
    assert engine.core.stats.prefix_cache_hits == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompt_logprobs_cover_the_prompt_once(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth)
    prompt = [number % 40 for number in range(50)]
    engine.add(prompt)
    engine.run()
    name = engine.add(prompt, prompt_logprobs=0, logprobs=0)
    engine.run()
    first, *rest = engine.outputs[name]
    assert first.num_cached_tokens == 0, "a hit would skip positions"
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:]] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in rest)
    assert [output.logprobs[0].token_id for output in engine.outputs[name]] == engine.tokens(name)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompt_logprobs_survive_preemption_amid_the_prompt(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth, num_blocks=9, block_size=8, max_num_seqs=2, max_num_batched_tokens=2)
    engine.add([3] * 30, max_tokens=30, ignore_eos=True)
    late = engine.add([4] * 24, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    while not engine.core.stats.preemptions:
        engine.step()
    assert engine.outputs[late] == []
    engine.run()
    engine.check_finished(late)
    sent = [output.prompt_logprobs for output in engine.outputs[late] if output.prompt_logprobs is not None]
    assert [[entry.logprob for entry in logprobs[1:]] for logprobs in sent] == [[-float(n) for n in range(1, 24)]]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_in_policy_order_is_preempted_and_comes_back_first(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth, num_blocks=9, block_size=8, max_num_seqs=2, max_num_batched_tokens=64)
    first = engine.add([2] * 20, max_tokens=40, ignore_eos=True)
    second = engine.add([3] * 20, max_tokens=30, ignore_eos=True)
    third = engine.add([4] * 3, max_tokens=2, ignore_eos=True)
    engine.run()
    order = [new.request_id for message in engine.client.messages for new in message.new]
    assert order == [first, second, second, third]
    resumed = [new for message in engine.client.messages for new in message.new if new.output_token_ids]
    assert [new.request_id for new in resumed] == [second]
    for name in (first, second, third):
        engine.check_finished(name)
    assert engine.core.stats.preemptions == 1
    assert engine.core.stats.prefix_cache_queries == 43, "coming back is no query"


def test_a_preempted_request_goes_before_later_ones_while_its_steps_are_in_the_air(toy_engine: Any) -> None:
    engine = toy_engine(depth=3, num_blocks=10, block_size=8, max_num_seqs=3, max_num_batched_tokens=64)
    first = engine.add([2] * 17, max_tokens=30, ignore_eos=True)
    second = engine.add([3] * 12, max_tokens=7, ignore_eos=True)  # its blocks come back one step before the third's
    third = engine.add([4] * 10, max_tokens=20, ignore_eos=True)
    fourth = engine.add([5] * 3, max_tokens=2, ignore_eos=True)
    engine.run()
    order = [new.request_id for message in engine.client.messages for new in message.new]
    assert order == [first, second, third, third, fourth]


def test_priorities_decide_who_is_admitted_and_who_is_preempted(toy_engine: Any) -> None:
    engine = toy_engine(policy="priority", max_num_seqs=1)
    low = engine.add([2] * 4, priority=5)
    high = engine.add([3] * 4, priority=-1)
    middle = engine.add([4] * 4, priority=0)
    engine.run()
    order = [new.request_id for message in engine.client.messages for new in message.new]
    assert order == [high, middle, low]


def test_nobody_is_preempted_for_blocks_that_are_about_to_come_back(toy_engine: Any) -> None:
    engine = toy_engine(depth=2, num_blocks=12, block_size=8, max_num_batched_tokens=64)
    names = [engine.add([number] * length, max_tokens=14, ignore_eos=True) for number, length in enumerate((17, 17, 4))]
    leaving = engine.add([4] * 7, max_tokens=20, ignore_eos=True)
    while engine.client.steps < 8:
        engine.step()
    assert engine.core.stats.kv_cache_usage == pytest.approx(10 / 11), "one block is free, and two will be wanted"
    engine.core.abort([leaving])
    engine.run()
    assert engine.core.stats.preemptions == 0
    for name in names:
        engine.check_finished(name)


def test_a_window_bounds_what_a_long_request_holds(toy_engine: Any) -> None:
    engine = toy_engine(num_blocks=5, block_size=8, windows=(10,), max_model_len=120, max_num_batched_tokens=8)
    name = engine.add([2] * 90, max_tokens=None, ignore_eos=True)
    engine.run()
    assert len(engine.tokens(name)) == 30
    engine.check_finished(name)
    engine.check_idle()


def test_a_window_needs_only_the_end_of_a_cached_prefix(toy_engine: Any) -> None:
    engine = toy_engine(num_blocks=40, block_size=8, windows=(0, 10), max_num_batched_tokens=64)
    prompt = [number % 40 for number in range(60)]
    engine.add(prompt, max_tokens=1)
    engine.run()
    again = engine.add(prompt, max_tokens=1)
    engine.run()
    assert engine.outputs[again][0].num_cached_tokens == 56
    full, windowed = engine.client.messages[-1].scheduled[0].new_blocks
    assert 0 not in full
    assert windowed[:5] == [0] * 5
    assert 0 not in windowed[5:]


@pytest.mark.parametrize(
    ("settings", "num_running"), [({}, 4), ({"num_blocks": 6, "block_size": 32, "max_num_seqs": 8}, 3)], ids=str
)
def test_cost_of_a_step_does_not_grow_with_the_queue(
    toy_engine: Any, settings: dict[str, Any], num_running: int
) -> None:
    def calls_in_a_step(num_queued: int) -> int:
        engine = toy_engine(**settings)
        for number in range(num_running + num_queued):
            engine.add([number % 40] * 5, max_tokens=60, ignore_eos=True)
        for _ in range(5):
            engine.core.step()
        scheduler = engine.core._scheduler
        count = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            ours = "fourfold/engine" in frame.f_code.co_filename  # not the garbage collector's callbacks
            count += ours and event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            scheduler.schedule()
        finally:
            sys.setprofile(None)
        assert (engine.core.stats.num_running, engine.core.stats.num_waiting) == (num_running, num_queued)
        return count

    few, many = calls_in_a_step(1), calls_in_a_step(1000)
    assert few > 0
    assert many == few
