from __future__ import annotations

import numpy as np
import pytest
import torch

from fourfold.sampling_params import SamplingParams
from fourfold.worker.cpu_device import CpuDevice
from fourfold.worker.penalties import SeenTokens, apply_penalties

DEVICE = CpuDevice(dtype=torch.float32)


def _penalised(logits: torch.Tensor, rows: list[int], seen: list[SeenTokens]) -> torch.Tensor:
    changed = logits.clone()
    apply_penalties(changed, np.array(rows), seen, DEVICE)
    return changed


def test_repetition_covers_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    seen = SeenTokens(SamplingParams(repetition_penalty=2.0), [0, 1, 4], [3])
    assert _penalised(logits, [0], [seen]).tolist() == [[1.0, -4.0, 2.0, -4.0, 0.0]]


def test_presence_and_frequency_cover_the_output_alone() -> None:
    logits = torch.zeros(1, 4)
    seen = SeenTokens(SamplingParams(presence_penalty=1.0, frequency_penalty=0.25), [0, 0], [1, 2, 2])
    assert _penalised(logits, [0], [seen]).tolist() == [[0.0, -1.25, -1.5, 0.0]]


def test_a_prompt_token_of_both_penalties() -> None:
    seen = SeenTokens(SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), [0], [0])
    assert _penalised(torch.tensor([[4.0]]), [0], [seen]).tolist() == [[1.0]]


def test_rows_have_their_own() -> None:
    logits = torch.ones(3, 3)
    first = SeenTokens(SamplingParams(presence_penalty=1.0), [], [0])
    second = SeenTokens(SamplingParams(frequency_penalty=0.5), [], [2, 2])
    nothing_yet = SeenTokens(SamplingParams(frequency_penalty=0.5), [1], [])
    changed = _penalised(logits, [2, 0, 1], [first, second, nothing_yet])
    assert changed.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]


def test_counts_grow_one_by_one_as_at_once() -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0)
    output = [int(token_id) for token_id in np.random.default_rng(1).integers(0, 60, 500)]
    at_once, one_by_one = SeenTokens(params, range(5), output), SeenTokens(params, range(5), [])
    for token_id in output:
        one_by_one.add(token_id)
    counts = dict(zip(one_by_one.ids.tolist(), one_by_one.counts.tolist()))
    assert counts == {token_id: output.count(token_id) for token_id in {*range(5), *output}}
    assert at_once.ids.tolist() == one_by_one.ids.tolist()
    assert at_once.counts.tolist() == one_by_one.counts.tolist()


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(), False),
        (SamplingParams(repetition_penalty=1.01), True),
        (SamplingParams(presence_penalty=-1.0), True),
        (SamplingParams(frequency_penalty=0.1), True),
    ],
)
def test_needed(params: SamplingParams, needed: bool) -> None:
    assert SeenTokens.needed(params) is needed
