from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from fourfold.errors import EngineError, ExecutorClosed, RpcTimeout, WorkerError
from fourfold.messages import FinishReason, StepOutput


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([2] * 128, {}, "the context is 128 tokens and the prompt has 128"),
        ([2, -1], {}, "token id -1; the vocabulary is 0 to 39"),
        ([2, 40], {}, "token id 40; the vocabulary is 0 to 39"),
        ([2], {"logit_bias": {40: 1.0}}, "logit_bias has token id 40"),
        ([2], {"stop_token_ids": (99,)}, "stop_token_ids has token id 99"),
    ],
)
def test_what_can_never_run_is_refused_and_hurts_nobody(
    toy_engine: Any, prompt: list[int], sampling: dict[str, Any], words: str
) -> None:
    engine = toy_engine()
    other = engine.add([2, 3])
    _, refusal = engine.try_add(prompt, **sampling)
    assert refusal.finish_reason is FinishReason.ERROR
    assert words in refusal.error
    assert refusal.error_status == 400
    engine.run()
    engine.check_finished(other)
    engine.check_idle()


def test_a_prompt_larger_than_the_cache_is_refused(toy_engine: Any) -> None:
    engine = toy_engine(num_blocks=4, block_size=8)
    _, refusal = engine.try_add([2] * 25)
    assert "25 tokens and the KV cache holds 24" in refusal.error
    assert refusal.error_status == 400
    largest = engine.add([2] * 24)
    engine.run()
    assert len(engine.tokens(largest)) == 1


def test_a_full_queue_refuses_with_429(toy_engine: Any) -> None:
    engine = toy_engine(max_num_seqs=2, max_num_waiting=1)
    names = [engine.add([2, number]) for number in range(3)]
    _, refusal = engine.try_add([2, 9])
    assert refusal.error_status == 429
    assert "3 requests are waiting" in refusal.error
    engine.step()
    _, refusal = engine.try_add([2, 9])
    assert refusal.error_status == 429
    engine.run()
    for name in names:
        engine.check_finished(name)
    assert engine.try_add([2, 9])[1] is None


def test_a_second_request_of_one_id_is_refused_and_the_first_goes_on(toy_engine: Any) -> None:
    engine = toy_engine()
    name = engine.add([2, 3, 4], request_id="same")
    engine.step()
    _, refusal = engine.try_add([9, 9], request_id="same")
    assert "already" in refusal.error
    engine.run()
    engine.check_finished(name)
    assert engine.try_add([9, 9], request_id="same")[1] is None, "free again when the first has ended"
    engine.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment(toy_engine: Any, depth: int, steps: int) -> None:
    engine = toy_engine(depth=depth, max_num_seqs=2)
    names = [engine.add([number] * 25, max_tokens=20, ignore_eos=True) for number in range(4)]
    for _ in range(steps):
        engine.step()
    victims = [names[0], names[3]]  # running and waiting
    engine.core.abort([*victims, "never heard of"])
    engine.core.abort(victims)
    counts = [len(engine.tokens(name)) for name in victims]
    reused = engine.add([7] * 25, request_id=victims[0], max_tokens=3, ignore_eos=True)
    engine.run()
    assert len(engine.tokens(names[3])) == counts[1], "no output after an abort"
    for name in (names[1], names[2], reused):
        engine.check_finished(name)
    engine.check_idle()
    assert [output.request_id for output in engine.events.finished].count(victims[1]) == 1


@pytest.mark.parametrize("depth", [2, 3])
def test_abort_of_a_request_that_was_just_preempted(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth, num_blocks=9, block_size=8, max_num_batched_tokens=64)
    first = engine.add([2] * 20, max_tokens=40, ignore_eos=True)
    second = engine.add([3] * 20, max_tokens=30, ignore_eos=True)
    while not engine.core.stats.preemptions:
        engine.step()
    engine.core.abort([second])
    engine.run()
    engine.check_finished(first)
    engine.check_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_s_failure_ends_it_alone(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth)
    names = [engine.add([number] * 5, ignore_eos=True) for number in range(3)]
    engine.client.failing[names[1]] = "logits are not finite"
    engine.run()
    (output,) = engine.outputs[names[1]]
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "logits are not finite")
    assert output.error_status == 500
    engine.check_finished(names[0])
    engine.check_finished(names[2])
    engine.check_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_worker_s_error_comes_out_and_every_request_can_be_failed(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth, max_num_seqs=2)
    names = [engine.add([number] * 5, client=number, ignore_eos=True) for number in range(3)]
    engine.step()
    engine.client.step_error = WorkerError(0, "execute_model", "ValueError", "boom")
    with pytest.raises(WorkerError, match="boom"):
        engine.run()
    outputs = engine.core.fail_all("the engine failed")
    assert {client: [output.request_id for output in group] for client, group in outputs.items()} == dict(
        enumerate([[name] for name in names])
    )
    assert {output.error for group in outputs.values() for output in group} == {"the engine failed"}
    assert {output.finish_reason for group in outputs.values() for output in group} == {FinishReason.ERROR}
    engine.check_idle()


def test_an_executor_that_refuses_a_step_lets_earlier_ones_finish(toy_engine: Any) -> None:
    engine = toy_engine(depth=2)
    engine.add([2] * 5, ignore_eos=True)
    send = engine.client.execute_model

    def refuse(message: Any) -> Any:
        if message.step >= 1:
            raise ExecutorClosed("the executor was shut down")
        return send(message)

    engine.client.execute_model = refuse
    engine.step()
    assert engine.core.stats.generation_tokens == 1
    with pytest.raises(ExecutorClosed):
        engine.step()
    engine.core.fail_all("closed")
    engine.check_idle()


def test_a_step_that_never_returns_is_a_timeout(toy_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    engine.core._rpc_timeout = 0.01
    monkeypatch.setattr("fourfold.engine.engine_core._GRACE", 0.0)
    engine.client.execute_model = lambda message: Future()
    engine.add([2])
    with pytest.raises(RpcTimeout, match=r"no reply to 'execute_model' within 0\.01 s from rank\(s\) 0"):
        engine.step()


def test_an_answer_to_another_step_is_an_error(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.add([2] * 5)
    for answer in (StepOutput(step=7, token_ids=[3]), StepOutput(step=0, token_ids=[3, 4])):
        future: Future[StepOutput] = Future()
        future.set_result(answer)
        engine.client.execute_model = lambda message, future=future: future
        with pytest.raises(EngineError, match=r"step \d with 1 rows was answered by step"):
            engine.step()
        engine.core.fail_all("confused")
        engine.check_idle()
        engine = toy_engine()
        engine.add([2] * 5)


def test_an_idle_engine_has_no_work(toy_engine: Any) -> None:
    engine = toy_engine(depth=2)
    assert not engine.core.has_work
    assert engine.core.step() == {}
    name = engine.add([2], max_tokens=1)
    assert engine.core.has_work
    engine.core.abort([name])
    assert not engine.core.has_work


def test_stats_count_what_happened(toy_engine: Any) -> None:
    engine = toy_engine(max_num_seqs=2)
    for number in range(3):
        engine.add([number] * 5, max_tokens=4, ignore_eos=True)
    assert engine.core.stats.num_queued_tokens == 3 * 9
    engine.step()
    stats = msgspec.structs.replace(engine.core.stats)
    assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (2, 1, 3 * 9 - 2 * 5)
    assert stats.kv_cache_usage == pytest.approx(2 / 63)
    engine.run()
    stats = engine.core.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.requests_finished) == (15, 12, 3)
    assert stats.num_steps == engine.client.steps == engine.events.steps
    assert 0 < stats.overhead_seconds <= stats.step_seconds
    assert stats.last_step_time > 0
    assert sorted(output.request_id for output in engine.events.finished) == sorted(engine.requests)


def test_time_in_the_model_is_no_overhead(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.add([2], max_tokens=1)
    send = engine.client.execute_model

    def slow(message: Any) -> Any:
        output = send(message).result()
        future: Future[StepOutput] = Future()
        future.set_result(msgspec.structs.replace(output, forward_seconds=1000.0))
        return future

    engine.client.execute_model = slow
    engine.step()
    stats = engine.core.stats
    assert 0 <= stats.overhead_seconds < stats.step_seconds


def test_shutdown_ends_the_workers(toy_engine: Any) -> None:
    engine = toy_engine()
    engine.core.shutdown()
    engine.core.shutdown()
    assert engine.client.shut_down


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_goes_on_from_what_another_engine_brought(toy_engine: Any, depth: int) -> None:
    options: list[dict[str, Any]] = [
        {"max_tokens": 20, "ignore_eos": True},
        {"max_tokens": 20, "min_tokens": 10, "stop_token_ids": tuple(range(0, 40, 3))},
    ]
    for number, sampling in enumerate(options):
        engine = toy_engine(depth=depth, max_num_seqs=2, max_num_waiting=1)
        prompt = [2, 3 + number, 4]
        whole = engine.add(prompt, request_id="whole", **sampling)
        engine.run()
        tokens = engine.tokens(whole)
        parts = [
            engine.add(prompt, request_id=f"part-{count}", output=tokens[:count], **sampling)
            for count in range(1, len(tokens))
        ]
        engine.run()
        for count, part in enumerate(parts, 1):
            assert engine.tokens(part) == tokens[count:]
            assert engine.finish_reason(part) == engine.finish_reason(whole)
        engine.check_idle()


def test_all_requests_of_a_client_can_be_ended(toy_engine: Any) -> None:
    engine = toy_engine(max_num_seqs=2)
    names = [engine.add([2, number], client=number % 2, ignore_eos=True) for number in range(6)]  # at 1.0 to 6.0
    engine.step()
    engine.core.abort_client(1, died=4.0)
    engine.run()
    assert [engine.finish_reason(name) is None for name in names] == [False, True, False, True, False, False], (
        "the last is its successor's"
    )
    engine.check_idle()


def test_what_layers_report_is_passed_on(toy_engine: Any) -> None:
    engine = toy_engine()
    assert engine.core.layer_report() == [{"operations": []}]
