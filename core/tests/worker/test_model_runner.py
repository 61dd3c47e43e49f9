from __future__ import annotations

import random
from time import perf_counter

import pytest
import torch

from fourfold.errors import CheckpointError, EngineError
from fourfold.messages import StepMessage
from fourfold.sampling_params import SamplingParams
from fourfold.worker.step_inputs import StepPlan

PROMPTS = {0: [5, 9, 3], 1: [40] * 9 + [2], 2: list(range(20)), 3: [96]}


@pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,))])
def test_alone_equals_the_reference(drive, greedy_reference, groups) -> None:
    for slot, prompt in PROMPTS.items():
        driver = drive(groups=groups)
        driver.add(slot, prompt)
        assert driver.generate([slot], 12)[slot] == greedy_reference(prompt, 12)


def test_batched_equals_alone(drive, greedy_reference) -> None:
    driver = drive(groups=((0,), (1,)))
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt)
    outputs = driver.generate([2, 0, 3, 1], 12)
    assert outputs == {slot: greedy_reference(prompt, 12) for slot, prompt in PROMPTS.items()}


def test_chunked_prefill_equals_whole(drive, greedy_reference) -> None:
    prompt = [(7 * i) % 97 for i in range(30)]
    driver = drive()
    driver.add(0, prompt)
    driver.add(1, [8, 8])
    decoded = []
    for chunk in (7, 1, 13, 9):
        output = driver.step({1: None, 0: chunk})
        decoded.append(output.token_ids[0])
    assert output.token_ids[1] == greedy_reference(prompt, 1)[0]
    assert decoded == greedy_reference([8, 8], 4)
    assert driver.generate([0, 1], 5)[0] == greedy_reference(prompt, 6)[1:]


def test_a_step_that_samples_nothing(drive) -> None:
    driver = drive()
    driver.add(0, [1, 2, 3, 4])
    output = driver.step({0: 2})
    assert (output.token_ids, output.errors, output.step) == ([], {}, 0)
    assert output.forward_seconds > 0


def test_only_rows_that_sample_reach_the_head(drive, history_model) -> None:
    model = history_model()
    driver = drive(model)
    driver.add(0, [1] * 10)
    driver.add(1, [2] * 10)
    driver.step({0: 5, 1: None})
    assert model.forwards == [15]
    assert model.logit_rows == [1]


def test_slots_are_reused(drive, greedy_reference) -> None:
    driver = drive()
    driver.add(0, [1, 2, 3], SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={4: 100.0}))
    assert driver.generate([0], 3)[0] == [4, 4, 4]
    driver.end(0)
    driver.add(0, [60, 61])
    assert driver.generate([0], 6)[0] == greedy_reference([60, 61], 6)


def test_preempted_requests_come_back_with_their_output(drive, greedy_reference) -> None:
    driver = drive()
    driver.add(0, [1, 2, 3])
    first = driver.generate([0], 5)[0]
    driver.end(0)
    driver.add(3, [1, 2, 3], output=first)
    driver.step({3: 6})
    assert first + driver.generate([3], 5)[3] == greedy_reference([1, 2, 3], 10)


def test_reset_blocks_starts_an_empty_table(drive, greedy_reference) -> None:
    driver = drive()
    driver.add(0, [9] * 20)
    output = driver.generate([0], 2)[0]
    driver.restart(0)
    assert output + driver.generate([0], 3)[0] == greedy_reference([9] * 20, 5)


def test_a_random_schedule_gives_every_request_its_own_text(drive, greedy_reference) -> None:
    generator = random.Random(7)
    driver = drive(groups=((0,), (1,)), max_num_seqs=6)
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    finished = 0
    for _ in range(120):
        for slot in range(6):
            if slot not in prompts and generator.random() < 0.3:
                prompts[slot] = [generator.randrange(97) for _ in range(generator.randrange(1, 20))]
                outputs[slot] = []
                driver.add(slot, prompts[slot])
        active = [slot for slot in prompts if generator.random() < 0.7]
        generator.shuffle(active)
        work = {slot: generator.randint(1, driver.known[slot] - driver.computed[slot]) for slot in active}
        if not work:
            continue
        message = driver.message(work)
        output = driver.runner.execute(message)
        sampling = [entry.slot for entry in message.scheduled if entry.samples]
        for slot, token_id in zip(sampling, output.token_ids, strict=True):
            outputs[slot].append(token_id)
            if len(outputs[slot]) == 10:
                assert outputs[slot] == greedy_reference(prompts.pop(slot), 10)
                driver.end(slot)
                finished += 1
    assert finished > 10


def test_more_slots_than_expected(drive, greedy_reference) -> None:
    driver = drive(max_num_seqs=2)
    driver.add(0, [1])
    driver.step({0: None})
    driver.add(11, [7, 7])
    outputs = driver.generate([0, 11], 4)
    assert outputs[11] == greedy_reference([7, 7], 4)
    assert outputs[0] == greedy_reference([1], 5)[1:]


def test_not_finite_logits_fail_their_request_alone(drive, history_model, greedy_reference) -> None:
    model = history_model()
    model.poison = 13
    driver = drive(model)
    driver.add(0, [1, 13])
    driver.add(1, [1, 14])
    output = driver.step({0: None, 1: None})
    assert list(output.errors) == [0]
    assert "not finite" in output.errors[0]
    assert output.token_ids[1] == greedy_reference([1, 14], 1)[0]
    assert len(output.token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "sampling", "text"),
    [
        ([1, 97], SamplingParams(temperature=0.0), "token id 97 is outside the vocabulary, 0 to 96"),
        ([-1, 5], SamplingParams(temperature=0.0), "token id -1 is outside"),
        ([1] * 65, SamplingParams(temperature=0.0), "has 65 tokens; the context holds 64"),
        ([1], SamplingParams(temperature=0.0, logit_bias={97: 1.0}), "logit_bias has token id 97"),
        ([1], SamplingParams(temperature=0.0, stop_token_ids=(1000,)), "stop_token_ids has token id 1000"),
    ],
)
def test_a_bad_request_fails_alone(drive, greedy_reference, prompt, sampling, text) -> None:
    driver = drive()
    driver.add(0, prompt, sampling)
    driver.add(1, [5])
    output = driver.step({0: 1, 1: None})
    assert list(output.errors) == [0]
    assert text in output.errors[0]
    assert output.token_ids[-1] == greedy_reference([5], 1)[0]


@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 1, 9, 1]])
@pytest.mark.parametrize("entries", [1 << 22, 97 * 2])
def test_prompt_logprobs_over_chunks(drive, logits_reference, monkeypatch, chunks, entries) -> None:
    monkeypatch.setattr("fourfold.worker.model_runner.PROMPT_LOGPROB_ENTRIES", entries)
    prompt = [(5 * i + 1) % 97 for i in range(12)]
    driver = drive()
    driver.add(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.add(1, [3])
    found = []
    for chunk in chunks:
        output = driver.step({1: None, 0: chunk})
        found += output.prompt_logprobs.get(0, [])
        assert set(output.prompt_logprobs) <= {0}
    assert [entry.token_id for entry in found] == prompt[1:]
    for index, entry in enumerate(found):
        row = torch.log_softmax(logits_reference(prompt[: index + 1]).double(), -1)
        assert entry.logprob == pytest.approx(float(row[prompt[index + 1]]), abs=1e-5)
        assert entry.rank == int((row > row[prompt[index + 1]]).sum()) + 1
        best = row.topk(2)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert driver.step({0: None}).prompt_logprobs == {}


def test_prompt_logprobs_are_not_sent_again_after_a_preemption(drive) -> None:
    driver = drive()
    driver.add(0, [1, 2, 3], SamplingParams(temperature=0.0, prompt_logprobs=0), output=[4, 5])
    assert driver.step({0: None}).prompt_logprobs == {}


def test_steps_in_the_air_run_in_order(drive, greedy_reference) -> None:
    driver = drive()
    driver.add(0, [1, 2])
    driver.add(1, [3] * 9)
    messages = [driver.message({0: None, 1: None}) for _ in range(6)]  # all scheduled before any token is known
    outputs = [driver.runner.execute(message) for message in messages]
    assert [output.token_ids[0] for output in outputs] == greedy_reference([1, 2], 6)
    assert [output.token_ids[1] for output in outputs] == greedy_reference([3] * 9, 6)


def test_warm_up_leaves_nothing_behind(drive, history_model, greedy_reference) -> None:
    model = history_model()
    driver = drive(model, groups=((0,), (1,)))
    driver.runner.warm_up()
    assert model.forwards == [7, 1]
    driver.add(0, [5, 6])
    assert driver.generate([0], 4)[0] == greedy_reference([5, 6], 4)


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 1, "max_num_seqs": 1}, {"max_model_len": 2}])
def test_warm_up_within_the_smallest_limits(drive, history_model, limits) -> None:
    model = history_model()
    drive(model, **limits).runner.warm_up()
    assert model.forwards == [1, 1]


def test_a_model_without_finite_logits_is_refused_at_the_start(drive, history_model) -> None:
    model = history_model()
    model.poison = 0
    with pytest.raises(CheckpointError, match="first logits are not finite; its weights are damaged"):
        drive(model).runner.warm_up()


def test_an_empty_step(drive) -> None:
    assert drive().runner.execute(StepMessage(step=3, ended=[0])).step == 3


def test_a_layer_without_a_group_is_refused(drive) -> None:
    with pytest.raises(EngineError, match=r"no KV-cache group has layer\(s\) 1"):
        drive(groups=((0,),))


def test_building_inputs_of_16_decodes_is_fast(drive) -> None:
    driver = drive(max_num_seqs=16)
    for slot in range(16):
        driver.add(slot, [1, 2])
    driver.step(dict.fromkeys(range(16)))
    message = driver.message(dict.fromkeys(range(16)))
    buffers = driver.runner._buffers
    seconds = []
    for _ in range(50):
        started = perf_counter()
        plan = StepPlan.of(message.scheduled)
        buffers.fill(plan)
        buffers.upload(plan)
        seconds.append(perf_counter() - started)
    assert min(seconds) < 300e-6  # 45 us on an idle machine
