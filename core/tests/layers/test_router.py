"""The router against a choice token by token in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from fourfold.layers.router import Router
from fourfold.models.description import MixtureDescription

MIXTURES = {
    "softmax": MixtureDescription(num_experts=8, top_k=3, intermediate_size=4),
    "softmax normalized": MixtureDescription(num_experts=8, top_k=3, intermediate_size=4, normalize=True, scale=1.5),
    "one": MixtureDescription(num_experts=8, top_k=1, intermediate_size=4, normalize=True),
    "all": MixtureDescription(num_experts=8, top_k=8, intermediate_size=4),
    "best of a group": MixtureDescription(
        num_experts=8, top_k=2, intermediate_size=4, num_groups=4, top_groups=2, scale=16.0
    ),
    "best two of a group, biased": MixtureDescription(
        num_experts=8,
        top_k=3,
        intermediate_size=4,
        scoring="sigmoid",
        normalize=True,
        scale=2.5,
        num_groups=4,
        top_groups=2,
        group_score="top2_sum",
        score_bias=True,
    ),
}


def chosen(mixture: MixtureDescription, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Expert -> weight."""
    if mixture.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        total = sum(math.exp(value) for value in logits)
        scores = [math.exp(value) / total for value in logits]
    choice = [score + extra for score, extra in zip(scores, bias)]
    size = mixture.num_experts // mixture.num_groups
    best = {"max": 1, "top2_sum": 2}[mixture.group_score]
    groups = sorted(
        range(mixture.num_groups),
        key=lambda group: -sum(sorted(choice[group * size : (group + 1) * size])[-best:]),
    )[: mixture.top_groups]
    allowed = [expert for expert in range(mixture.num_experts) if expert // size in groups]
    taken = sorted(allowed, key=lambda expert: -choice[expert])[: mixture.top_k]
    total = sum(scores[expert] for expert in taken) if mixture.normalize else 1.0
    return {expert: scores[expert] / total * mixture.scale for expert in taken}


@pytest.mark.parametrize("name", MIXTURES)
def test_it_chooses_as_written(name: str) -> None:
    mixture = MIXTURES[name]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 8, generator=generator) * 2
    bias = torch.randn(8, generator=generator) if mixture.score_bias else None
    ids, weights = Router(mixture)(logits, bias)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.shape == weights.shape == (40, mixture.top_k)
    for row in range(40):
        expected = chosen(mixture, logits[row].tolist(), [0.0] * 8 if bias is None else bias.tolist())
        found = dict(zip(ids[row].tolist(), weights[row].tolist()))
        assert found == pytest.approx(expected, rel=1e-5)


def test_no_tokens_and_scores_that_vanish() -> None:
    mixture = MIXTURES["best two of a group, biased"]
    ids, weights = Router(mixture)(torch.empty(0, 8), torch.zeros(8))
    assert ids.shape == weights.shape == (0, 3)
    _, weights = Router(mixture)(torch.full((2, 8), -200.0), torch.zeros(8))
    assert bool(weights.isfinite().all()), "a sum of scores that are all 0 divides nothing by 0"
