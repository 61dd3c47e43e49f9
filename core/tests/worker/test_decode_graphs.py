from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.step_graph import StepRecorder
from fourfold.entries import ComputeContext
from fourfold.layers.lora_linear import LoraLinearMethod
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.layers.torch_operators import TorchOperators
from fourfold.models.adapters import AdapterSlots
from fourfold.sampling_params import SamplingParams

CONTEXT = ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32)


def test_plain_torch_records_nothing(recording_operators) -> None:
    assert not isinstance(TorchOperators(CONTEXT), StepRecorder)
    assert isinstance(recording_operators(), StepRecorder)


def test_decodes_replay_padded_graphs_and_agree_with_plain_steps(
    drive, recording_operators, history_model, greedy_reference
) -> None:
    operators = recording_operators()
    driver = drive(history_model(operators=operators), groups=((0,), (1,)))
    prompts = {0: [1, 2], 1: [50] * 9, 2: [7], 3: [8, 9, 10], 4: [96]}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    outputs = driver.generate(list(prompts), 1)
    assert operators.graphs == []  # prompts, and five are more than the largest size
    for slots in ([0, 1, 2], [3], [2, 4, 0, 1], [0, 3], [0, 1, 2, 3, 4], [1, 2, 3]):
        for slot, ids in driver.generate(slots, 3).items():
            outputs[slot] += ids
    for slot, prompt in prompts.items():
        assert outputs[slot] == greedy_reference(prompt, len(outputs[slot]))
    assert operators.asked == 2
    assert [graph.replays for graph in operators.graphs] == [9, 6]


def test_random_rows_of_a_graph(drive, recording_operators, history_model) -> None:
    texts = []
    for operators in (recording_operators(), recording_operators(sizes=())):
        driver = drive(history_model(operators=operators))
        for slot in range(3):
            driver.add(slot, [slot], SamplingParams(seed=slot, top_p=0.9, logit_bias={4: 3.0}, logprobs=1))
        texts.append(driver.generate([0, 1, 2], 8))
        assert len(operators.graphs) == (1 if operators.batch_sizes(8) else 0)
    assert texts[0] == texts[1]


def test_prompts_and_mixed_steps_run_plainly(drive, recording_operators, history_model) -> None:
    operators = recording_operators()
    driver = drive(history_model(operators=operators))
    driver.add(0, [1])
    driver.add(1, [1, 2])
    driver.step({0: None, 1: 1})
    assert operators.graphs == []


def test_a_step_that_cannot_be_recorded_runs_plainly(
    drive, recording_operators, history_model, greedy_reference
) -> None:
    operators = recording_operators(refuses=True)
    driver = drive(history_model(operators=operators))
    driver.add(0, [1, 2])
    assert driver.generate([0], 5)[0] == greedy_reference([1, 2], 5)
    assert operators.asked == 1


@pytest.mark.parametrize("times", [1, 2])
def test_close_releases_graphs(drive, recording_operators, history_model, times: int) -> None:
    operators = recording_operators()
    driver = drive(history_model(operators=operators))
    driver.runner.warm_up()
    for _ in range(times):
        driver.runner.close()
    assert [graph.closed for graph in operators.graphs] == [True]


def test_steps_with_adapters_run_plainly(drive, recording_operators, history_model) -> None:
    operators = recording_operators()
    method = LoraLinearMethod(TorchLinearMethod(CONTEXT), device=CONTEXT.device, dtype=torch.float32)
    driver = drive(history_model(operators=operators), adapters=AdapterSlots(method, {}, ()))
    for slot, adapter in enumerate((0, 3, 0, 2)):
        driver.add(slot, [slot + 5, 7], adapter=adapter)
    seen = []
    for slots in ([0, 2], [1], [0, 1, 2], [3, 1], [0, 2]):
        before = sum(graph.replays for graph in operators.graphs)
        driver.generate(slots, 2)
        rows = [(slot, None if tokens is None else tokens.tolist()) for slot, tokens in method.rows]
        seen.append((sum(graph.replays for graph in operators.graphs) - before, rows))
    # The first step of a slot is its prompt's.
    assert seen == [(1, []), (0, [(3, None)]), (0, [(3, [1])]), (0, [(2, [0]), (3, [1])]), (2, [])]
