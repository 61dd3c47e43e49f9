"""Stages of a pipeline, one runner each, with queues for a transport: together they say what one runner says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup
from fourfold.entries import ComputeContext
from fourfold.layers.torch_operators import TorchOperators
from fourfold.messages import StepMessage, StepOutput
from fourfold.models.stage_partition import Stage, stages
from fourfold.sampling_params import SamplingParams
from fourfold.worker.device import CpuDevice
from fourfold.worker.model_runner import ModelRunner
from fourfold.worker.pipeline_stage import PipelineStage
from fourfold.worker.request_state import RequestState

VOCABULARY = 97
NUM_LAYERS = 4
MAX_TOKENS = 64
CPU = CpuDevice(dtype=torch.float32)


class Queues:
    """A transport of one process; what is sent can be received later, in order, as often as it was sent."""

    def __init__(self, depth: int) -> None:
        self.waited_seconds = 0.0
        self.arrived = torch.zeros(2, MAX_TOKENS, 2)
        self.next: Queues | None = None
        self.first: Queues | None = None
        self._depth = depth
        self._activations: deque[tuple[int, torch.Tensor]] = deque()
        self._ids: deque[tuple[int, torch.Tensor]] = deque()
        self.closed = False

    def send_activations(self, step: int, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        assert self.next is not None
        self.next._activations.append((step, torch.stack([hidden, residual])))

    def receive_activations(self, step: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        sent, both = self._activations.popleft()
        assert (sent, both.shape[1]) == (step, num_tokens)
        self.arrived[:, :num_tokens] = both
        return self.activations(num_tokens)

    def activations(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.arrived[0, :rows], self.arrived[1, :rows]

    def send_ids(self, step: int, ids: torch.Tensor) -> None:
        assert self.first is not None
        self.first._ids.append((step, ids.clone()))
        assert len(self.first._ids) <= self._depth, "the first stage leaves more ids than the transport holds"

    def receive_ids(self, step: int, count: int) -> torch.Tensor:
        sent, ids = self._ids.popleft()
        assert (sent, len(ids)) == (step, count)
        return ids

    def close(self) -> None:
        self.closed = True


class StageOfHistory:
    """Some layers of a HistoryModel: what they saw is the hidden state, the token the residual."""

    dtype = kv_cache_dtype = torch.float32

    def __init__(self, stage: Stage, history: Any, operators: TorchOperators | None) -> None:
        self.stage = stage
        self._history = history(layers=tuple(stage.layers), operators=operators)
        self.operators = self._history.operators
        self.kv_cache_specs, self.kv_cache_shape = self._history.kv_cache_specs, self._history.kv_cache_shape
        self.collect_logits, self.local_logits = self._history.collect_logits, self._history.local_logits
        self.best_tokens = self._history.best_tokens
        self.widths: list[int] = []
        self._embedded: dict[int, torch.Tensor] = {}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # At one address a size, as in a recording.
        embedded = self._embedded.setdefault(len(token_ids), torch.zeros(len(token_ids), 2))
        embedded[:, 1] = token_ids
        return embedded

    def run_layers(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, positions: Any, kv_caches: Any, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.widths.append(len(residual))
        seen = self._history.forward(residual[:, 1].long(), positions, kv_caches, metadata)
        seen[:, 0] *= len(kv_caches) / NUM_LAYERS
        seen[:, 1] = 0
        return (seen if hidden is None else seen + hidden), residual

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden + residual

    def forward(self, *inputs: Any) -> torch.Tensor:
        raise AssertionError("a stage has not all layers")


class Pipeline:
    """All stages, one after the other in each step."""

    def __init__(self, history: Any, sizes: Sequence[int], recorders: Sequence[Any] = ()) -> None:
        depth = len(sizes)
        self.queues = [Queues(depth) for _ in sizes]
        for one, following in zip(self.queues, self.queues[1:]):
            one.next = following
        self.queues[-1].first = self.queues[0]
        self.models = [
            StageOfHistory(stage, history, recorders[index] if recorders else None)
            for index, stage in enumerate(stages(sizes))
        ]
        specs = {layer: spec for model in self.models for layer, spec in model.kv_cache_specs().items()}
        groups = (KVCacheGroup(spec=specs[0], layers=tuple(range(NUM_LAYERS))),)
        cache = KVCacheConfig(groups=groups, num_blocks=65)
        self.runners = [
            ModelRunner(
                model,
                CPU,
                cache=cache,
                scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=MAX_TOKENS),
                max_model_len=64,
                vocabulary_size=VOCABULARY,
                join=lambda state, model=model, queues=queues: _join(model, queues, state, depth),
            )
            for model, queues in zip(self.models, self.queues)
        ]

    def execute(self, message: StepMessage) -> StepOutput:
        *others, last = [runner.execute(message) for runner in self.runners]
        assert all(other.token_ids == [] for other in others)
        return last


def _join(model: StageOfHistory, queues: Any, state: RequestState, depth: int) -> PipelineStage:
    return PipelineStage(model, queues, state, CPU, depth=depth)


@pytest.fixture
def pipeline(history_model: Any, make_driver: Any) -> Callable[..., tuple[Pipeline, Any]]:
    def build(sizes: Sequence[int] = (1, 2, 1), **more: Any) -> tuple[Pipeline, Any]:
        built = Pipeline(history_model, sizes, **more)
        return built, make_driver(built, num_groups=1, num_blocks=65)

    return build


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 1), (1, 1, 1, 1)], ids=str)
def test_ids_come_back_and_are_built_on(pipeline: Any, greedy_reference: Any, sizes: Sequence[int]) -> None:
    _, driver = pipeline(sizes)
    prompts = {0: [1, 2, 3], 1: [9], 2: [50] * 12}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    outputs = driver.generate([0, 1, 2], 3)
    for slots in ([0], [1, 2], [2, 0], [1]):
        for slot, ids in driver.generate(slots, 4).items():
            outputs[slot] += ids
    for slot, prompt in prompts.items():
        assert outputs[slot] == greedy_reference(prompt, len(outputs[slot]))


def test_a_slot_that_ends_takes_no_id_of_its_last_request(pipeline: Any, greedy_reference: Any) -> None:
    _, driver = pipeline((2, 2))
    driver.add(0, [1, 2])
    driver.add(1, [3])
    driver.generate([0, 1], 2)  # the last ids of both are not needed any more
    driver.end(0)
    driver.end(1)
    driver.add(0, [7, 8])
    driver.add(1, [4] * 9)
    assert driver.generate([1], 5)[1] == greedy_reference([4] * 9, 5)
    assert driver.generate([0], 5)[0] == greedy_reference([7, 8], 5)


def test_ids_that_nobody_needs_do_not_pile_up(pipeline: Any) -> None:
    built, driver = pipeline((2, 2))
    for slot in range(6):
        driver.add(slot, [slot + 1])
        driver.step({slot: None})  # each samples once and is never continued
    assert len(built.queues[0]._ids) <= 2


def test_chunks_and_prompt_logprobs(pipeline: Any, drive: Any) -> None:
    prompt = list(range(20, 37))
    found = []
    for driver in (pipeline()[1], drive()):
        driver.add(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1))
        parts = [driver.step({0: 5}), driver.step({0: 9}), driver.step({0: None})]
        entries = [entry for part in parts for entry in part.prompt_logprobs.get(0, [])]
        found.append((entries, parts[-1].token_ids, parts[-1].logprobs))
    assert len(found[0][0]) == len(prompt) - 1
    assert [entry.token_id for entry in found[0][0]] == prompt[1:]
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert (mine.rank, mine.top[0][0]) == (theirs.rank, theirs.top[0][0])
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert found[0][1] == found[1][1]


def test_what_depends_on_the_output_so_far(pipeline: Any, drive: Any) -> None:
    """Seeds, penalties and a minimum live where sampling is, and count the same output."""
    sampling = [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.7, seed=3, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=tuple(range(0, VOCABULARY, 2))),
        SamplingParams(temperature=0.0, logit_bias={5: 3.0}, frequency_penalty=1.0),
    ]
    results = []
    for driver in (pipeline()[1], drive()):
        for slot, params in enumerate(sampling):
            driver.add(slot, [3, 1, 4 + slot], params)
        results.append(driver.generate(range(len(sampling)), 9))
    assert results[0] == results[1]


def test_a_request_that_was_preempted_goes_on(pipeline: Any, greedy_reference: Any) -> None:
    _, driver = pipeline()
    expected = greedy_reference([5, 6], 9)
    driver.add(0, [5, 6])
    driver.add(1, [8])
    assert driver.generate([0, 1], 4)[0] == expected[:4]
    driver.end(0)
    driver.add(2, [5, 6], output=expected[:4])
    assert driver.generate([2, 1], 5)[2] == expected[4:]


class Recorder(TorchOperators):
    """Records at sizes 2 and 4; what is replayed reads the stage's own buffers."""

    def __init__(self) -> None:
        super().__init__(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))
        self.replays = 0

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        return [2, 4]

    def capture(self, step: Callable[[], torch.Tensor]) -> Any:
        return Graph(self, step)


class Graph:
    def __init__(self, recorder: Recorder, step: Callable[[], torch.Tensor]) -> None:
        self._recorder, self._step = recorder, step
        self._output = step().clone()

    def replay(self) -> torch.Tensor:
        self._recorder.replays += 1
        self._output.copy_(self._step())
        return self._output

    def close(self) -> None:
        pass


def test_every_stage_replays_what_it_recorded(pipeline: Any, greedy_reference: Any) -> None:
    recorders = [Recorder() for _ in range(3)]
    built, driver = pipeline((1, 2, 1), recorders=recorders)
    prompts = {0: [1, 2], 1: [50] * 9, 2: [7]}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    outputs = driver.generate([0, 1, 2], 6)
    for slot, prompt in prompts.items():
        assert outputs[slot] == greedy_reference(prompt, 6)
    assert [recorder.replays for recorder in recorders] == [5, 5, 5]
    assert all(model.widths[-1] == 4 for model in built.models), "padded on every stage"
    for runner in built.runners:
        runner.close()
    assert all(queues.closed for queues in built.queues)
