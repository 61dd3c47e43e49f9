from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.layers.philox import gumbel_rows
from fourfold.layers.torch_operators import TorchOperators
from fourfold.messages import NewRequest
from fourfold.sampling_params import SamplingParams
from fourfold.worker.cpu_device import CpuDevice
from fourfold.worker.sampler import Sampled, Sampler
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import SamplingInputs

VOCABULARY = 1013
PROMPT = [3, 3, 5, 900]
OUTPUT = [5, 7, 7, 7]


class Bench:
    """A sampler with requests of equal prompt and output in slots 0, 1, 2 ..."""

    def __init__(self, *params: SamplingParams, eos: tuple[int, ...] = ()) -> None:
        device = CpuDevice(dtype=torch.float32)
        context = ComputeContext(config=EngineConfig(), device=device.torch_device, dtype=device.dtype)
        self.state = SamplingState(slots=4, vocabulary_size=VOCABULARY)
        for slot, sampling in enumerate(params):
            self.state.add(NewRequest(f"r{slot}", slot, PROMPT, sampling, eos, OUTPUT))
        self.sampler = Sampler(self.state, operators=TorchOperators(context), device=device)

    def sample(self, logits: torch.Tensor, *, slots: list[int] | None = None, position: int = len(OUTPUT)) -> Drawn:
        chosen = np.arange(len(logits)) if slots is None else np.array(slots)
        positions = np.full(len(chosen), position)
        rows = self.state.rows[chosen]
        inputs = SamplingInputs(
            slots=torch.from_numpy(chosen),
            inverse_temperature=torch.from_numpy(rows["inverse_temperature"].copy()),
            seeds=torch.from_numpy(rows["seed"].copy()),
            positions=torch.from_numpy(positions),
        )
        return Drawn(self.sampler.sample(logits.clone(), chosen, positions, inputs))


class Drawn:
    """What came of a pass, on the host."""

    def __init__(self, sampled: Sampled) -> None:
        self.token_ids = sampled.token_ids.numpy()
        self.broken = np.flatnonzero(sampled.codes.numpy() < 0)
        self.logprobs = [] if sampled.logprobs is None else [None] * len(self.token_ids)
        if sampled.logprobs is not None:
            entries = sampled.logprobs.read([tensor.numpy() for tensor in sampled.logprobs.tensors])
            for row, entry in zip(sampled.wanted.tolist(), entries, strict=True):
                self.logprobs[row] = entry


def expected_probabilities(logits: torch.Tensor, p: SamplingParams, *, prompt=PROMPT, output=OUTPUT) -> torch.Tensor:
    """fp64 [V] after everything that ``p`` asks for, written as the definitions read."""
    row = logits.double().tolist()
    for token_id, bias in p.logit_bias.items():
        row[token_id] += bias
    for token_id in {*prompt, *output}:
        row[token_id] = (
            row[token_id] / p.repetition_penalty if row[token_id] > 0 else row[token_id] * p.repetition_penalty
        )
    for token_id in set(output):
        row[token_id] -= p.presence_penalty + p.frequency_penalty * output.count(token_id)
    probabilities = torch.softmax(torch.tensor(row, dtype=torch.float64) / p.temperature, -1)
    if p.min_p:
        probabilities[probabilities < p.min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True)
    if p.top_k:
        probabilities[order[p.top_k :]] = 0
    probabilities /= probabilities.sum()
    mass = 0.0
    for token_id in order.tolist():
        if mass >= p.top_p:
            probabilities[token_id] = 0
        mass += float(probabilities[token_id])
    return probabilities / probabilities.sum()


def expected_draw(logits: torch.Tensor, p: SamplingParams, position: int) -> int:
    noise = gumbel_rows(torch.tensor([p.seed]), torch.tensor([position]), len(logits))[0]
    return int((expected_probabilities(logits, p).log() + noise.double()).argmax())


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": 5000},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"logit_bias": {3: 4.0, 1012: -100.0, 7: 2.5}},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2, "logit_bias": {9: 3.0}},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.1, "top_p": 0.7},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_definition(setting: dict) -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in range(25):
        params = SamplingParams(seed=seed, **setting)
        logits = torch.randn(VOCABULARY, generator=generator) * 3
        sampled = Bench(params).sample(logits[None], position=seed)
        assert sampled.token_ids[0] == expected_draw(logits, params, seed), seed


def test_all_rows_in_one_pass_equal_each_alone() -> None:
    params = [SamplingParams(seed=100 + index, **setting) for index, setting in enumerate(SETTINGS)]
    params += [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, frequency_penalty=1.0)]
    logits = torch.randn(len(params), VOCABULARY) * 3
    together = Bench(*params).sample(logits)
    bench = Bench(*params)
    for row in range(len(params)):
        alone = bench.sample(logits[row : row + 1], slots=[row])
        assert alone.token_ids[0] == together.token_ids[row]
    reversed_rows = list(range(len(params)))[::-1]
    backwards = Bench(*params).sample(logits[reversed_rows], slots=reversed_rows)
    assert backwards.token_ids.tolist() == together.token_ids.tolist()[::-1]


def test_draws_have_the_distribution() -> None:
    logits = torch.full((VOCABULARY,), -30.0)
    logits[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    bench = Bench(*[SamplingParams(seed=seed, top_p=0.85) for seed in range(3000)])
    ids = bench.sample(logits.expand(3000, -1)).token_ids
    shares = np.bincount(ids, minlength=4)[:4] / 3000
    np.testing.assert_allclose(shares, [4 / 9, 3 / 9, 2 / 9, 0], atol=0.03)


def test_greedy_needs_no_noise_and_takes_the_first_of_equals() -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1] = 0.0
    for temperature in (0.0, 1e-6):
        bench = Bench(*[SamplingParams(temperature=temperature, top_k=3, top_p=0.5)] * 3)
        assert bench.sample(logits).token_ids.tolist() == logits.argmax(-1).tolist()


def test_very_low_temperatures_are_finite() -> None:
    logits = torch.randn(1, VOCABULARY) * 40
    sampled = Bench(SamplingParams(temperature=2e-5, top_p=0.9, min_p=0.1, seed=3)).sample(logits)
    assert sampled.token_ids[0] == logits.argmax()


@pytest.mark.parametrize(("position", "masked"), [(0, True), (4, True), (5, False)])
def test_min_tokens_masks_what_would_end(position: int, masked: bool) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [2, 8, 11]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(8,))
    sampled = Bench(params, eos=(2,)).sample(logits, position=position)
    assert sampled.token_ids[0] == (11 if masked else 2)


def test_min_tokens_leaves_eos_when_eos_is_ignored() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 2] = 9.0
    params = SamplingParams(temperature=0.0, min_tokens=5, ignore_eos=True)
    assert Bench(params, eos=(2,)).sample(logits, position=0).token_ids[0] == 2


def test_min_tokens_without_anything_that_ends() -> None:
    logits = torch.randn(1, VOCABULARY)
    assert (
        Bench(SamplingParams(temperature=0.0, min_tokens=5)).sample(logits, position=0).token_ids[0] == logits.argmax()
    )


def test_penalties_count_as_the_output_grows() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    bench = Bench(params)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [50, 51]] = torch.tensor([3.5, 2.0])
    drawn = []
    for _ in range(6):
        ids = bench.sample(logits).token_ids
        bench.state.seen[0].add(int(ids[0]))
        drawn.append(int(ids[0]))
    assert drawn == [50, 50, 51, 50, 51, 50]  # 3.5 2.5 | 1.5 < 2.0 | 1.5 > 1.0 | 0.5 < 1.0 | 0.5 > 0.0


def test_bias_stays_with_its_row() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 6] = 1.0
    bench = Bench(SamplingParams(temperature=0.0, logit_bias={5: 100.0}), SamplingParams(temperature=0.0))
    assert bench.sample(logits).token_ids.tolist() == [5, 6]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(4, VOCABULARY) * 2
    bench = Bench(
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={40: 100.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, temperature=1.5, top_k=4, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=1, frequency_penalty=2.0),
    )
    sampled = bench.sample(logits)
    expected = torch.log_softmax(logits.double(), -1)
    assert sampled.token_ids[0] == 40
    assert sampled.logprobs[1] is None
    for row, num_top in ((0, 3), (2, 0), (3, 1)):
        entry = sampled.logprobs[row]
        assert entry.token_id == sampled.token_ids[row]
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-5)
        assert entry.rank == int((expected[row] > expected[row, entry.token_id]).sum()) + 1
        best = expected[row].topk(num_top)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_no_logprobs_unless_a_row_asks() -> None:
    assert Bench(SamplingParams(seed=1)).sample(torch.randn(1, VOCABULARY)).logprobs == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_rows_are_named_and_hurt_nobody(value: float) -> None:
    params = [SamplingParams(seed=4, top_p=0.9, logprobs=2), SamplingParams(temperature=0.0), SamplingParams(seed=5)]
    logits = torch.randn(3, VOCABULARY)
    healthy = Bench(*params).sample(logits)
    broken = logits.clone()
    broken[1, 17] = value
    sampled = Bench(*params).sample(broken)
    assert sampled.broken.tolist() == [1]
    assert sampled.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    assert sampled.logprobs == healthy.logprobs
    assert healthy.broken.tolist() == []


def test_logprobs_know_nothing_of_the_cut() -> None:
    logits = torch.randn(1, VOCABULARY)
    entry = Bench(SamplingParams(seed=2, top_k=2, logprobs=5)).sample(logits).logprobs[0]
    expected = torch.log_softmax(logits.double(), -1)[0].topk(5).values
    assert [value for _, value in entry.top] == pytest.approx(expected.tolist(), abs=1e-5)
