from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.step_graph import StepRecorder
from fourfold.entries import ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.torch_operators import TorchOperators
from fourfold.sampling_params import SamplingParams


class Graph:
    """Runs the step again and writes to the first output, as a recorded one would."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step = step
        self._output = step().clone()
        self.replays = 0
        self.closed = False

    def replay(self) -> torch.Tensor:
        self.replays += 1
        self._output.copy_(self._step())
        return self._output

    def close(self) -> None:
        self.closed = True


class RecordingOperators(TorchOperators):
    def __init__(self, sizes: Sequence[int] = (4, 2), *, refuses: bool = False) -> None:
        super().__init__(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))
        self.graphs: list[Graph] = []
        self._sizes = sizes
        self._refuses = refuses
        self.asked = 0

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        return [size for size in self._sizes if size <= max_batch_size]

    def capture(self, step: Callable[[], torch.Tensor]) -> Graph:
        self.asked += 1
        if self._refuses:
            raise Unsupported("aten::add ran")
        self.graphs.append(Graph(step))
        return self.graphs[-1]


def test_plain_torch_records_nothing() -> None:
    context = ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32)
    assert not isinstance(TorchOperators(context), StepRecorder)
    assert isinstance(RecordingOperators(), StepRecorder)


def test_decodes_replay_padded_graphs_and_agree_with_plain_steps(drive, history_model, greedy_reference) -> None:
    operators = RecordingOperators()
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


def test_random_rows_of_a_graph(drive, history_model) -> None:
    texts = []
    for operators in (RecordingOperators(), RecordingOperators(sizes=())):
        driver = drive(history_model(operators=operators))
        for slot in range(3):
            driver.add(slot, [slot], SamplingParams(seed=slot, top_p=0.9, logit_bias={4: 3.0}, logprobs=1))
        texts.append(driver.generate([0, 1, 2], 8))
        assert len(operators.graphs) == (1 if operators.batch_sizes(8) else 0)
    assert texts[0] == texts[1]


def test_prompts_and_mixed_steps_run_plainly(drive, history_model) -> None:
    operators = RecordingOperators()
    driver = drive(history_model(operators=operators))
    driver.add(0, [1])
    driver.add(1, [1, 2])
    driver.step({0: None, 1: 1})
    assert operators.graphs == []


def test_a_step_that_cannot_be_recorded_runs_plainly(drive, history_model, greedy_reference) -> None:
    operators = RecordingOperators(refuses=True)
    driver = drive(history_model(operators=operators))
    driver.add(0, [1, 2])
    assert driver.generate([0], 5)[0] == greedy_reference([1, 2], 5)
    assert operators.asked == 1


@pytest.mark.parametrize("times", [1, 2])
def test_close_releases_graphs(drive, history_model, times: int) -> None:
    operators = RecordingOperators()
    driver = drive(history_model(operators=operators))
    driver.runner.warm_up()
    for _ in range(times):
        driver.runner.close()
    assert [graph.closed for graph in operators.graphs] == [True]
