from __future__ import annotations

import pytest
import torch

from fourfold.worker.wide_rows import largest, truncate, truncate_sorted


@pytest.mark.parametrize(
    ("width", "k"),
    [(1, 1), (5, 1), (5, 3), (5, 5), (64, 3), (64, 20), (1000, 20), (1000, 1000), (4099, 1), (4099, 900)],
)
def test_largest_equals_topk(width: int, k: int) -> None:
    rows = torch.randn(7, width)
    found, expected = largest(rows, k), rows.topk(k, -1)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(rows.gather(-1, found.indices), expected.values)


def test_largest_finds_neighbours_a_whole_group_and_the_rest_of_the_row() -> None:
    rows = torch.zeros(2, 4099)
    rows[0, 100:105] = torch.arange(5.0) + 1
    rows[1, [0, 4098, 4097]] = torch.tensor([1.0, 3.0, 2.0])
    found = largest(rows, 3)
    assert found.indices[0].tolist() == [104, 103, 102]
    assert found.indices[1].tolist() == [4098, 4097, 0]


def _truncate(logits: torch.Tensor, *, scale: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    rows = len(logits)
    found, twin = (
        cut(
            logits,
            torch.full((rows,), scale),
            top_k=torch.full((rows,), top_k),
            top_p=torch.full((rows,), top_p, dtype=torch.float64),
            min_p=torch.full((rows,), min_p),
        )
        for cut in (truncate, truncate_sorted)
    )
    assert torch.equal(found, twin)
    return found


def test_truncate_keeps_values_and_drops_the_rest() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    assert _truncate(logits, top_k=2).tolist() == [[-torch.inf, 4.0, -torch.inf, 3.0]]
    assert torch.equal(_truncate(logits), logits)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.8, 0.99, 1 - 1e-7])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_top_p_keeps_the_smallest_set_with_the_mass(top_p: float, spread: float) -> None:
    logits = torch.randn(5, 3000) * spread
    kept = _truncate(logits, top_p=top_p) > -torch.inf
    probabilities = torch.softmax(logits.double(), -1)
    mass = torch.where(kept, probabilities, 0.0).sum(-1)
    assert bool((mass >= top_p - 1e-6).all())
    least = torch.where(kept, probabilities, 2.0).amin(-1, keepdim=True)
    without_least = torch.where(kept & (probabilities > least), probabilities, 0.0).sum(-1)
    assert bool((without_least < top_p + 1e-6).all())
    assert bool(((probabilities < least) | kept).all())


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first three, 0.4 and 0.3 hold 0.78; alone they hold 0.7.
    assert (_truncate(logits, top_k=3, top_p=0.75) > -torch.inf).tolist() == [[True, True, False, False]]
    assert (_truncate(logits, top_p=0.75) > -torch.inf).tolist() == [[True, True, True, False]]


def test_min_p_is_a_share_of_the_likeliest_at_the_temperature() -> None:
    logits = torch.tensor([[0.5, 0.26, 0.24]]).log()
    assert (_truncate(logits, min_p=0.5) > -torch.inf).tolist() == [[True, True, False]]
    assert (_truncate(logits, min_p=0.5, scale=2.0) > -torch.inf).tolist() == [[True, False, False]]
    assert (_truncate(logits, min_p=1.0) > -torch.inf).tolist() == [[True, False, False]]


def test_each_row_has_its_own_cut() -> None:
    logits = torch.randn(4, 500)
    settings = {
        "top_k": torch.tensor([0, 3, 0, 700]),
        "top_p": torch.tensor([1.0, 1.0, 0.4, 0.9], dtype=torch.float64),
        "min_p": torch.tensor([0.2, 0.0, 0.0, 0.0]),
    }
    scale = torch.tensor([1.0, 0.5, 2.0, 1.3])
    together = truncate(logits, scale, **settings)
    for row in range(4):
        one = slice(row, row + 1)
        alone = truncate(logits[one], scale[one], **{name: values[one] for name, values in settings.items()})
        assert torch.equal(alone, together[one])
    assert (together > -torch.inf).sum(-1)[1] == 3


@pytest.mark.parametrize("top_k", [1023, 1024, 1025, 2999, 3000, 5000])
def test_top_k_of_any_size(top_k: int) -> None:
    logits = torch.randn(2, 3000)
    kept = (_truncate(logits, top_k=top_k) > -torch.inf).sum(-1)
    assert kept.tolist() == [min(top_k, 3000)] * 2
    nucleus = (_truncate(logits, top_k=top_k, top_p=0.5) > -torch.inf).sum(-1)
    for row in range(2):
        best = torch.softmax(logits[row].double().sort(descending=True).values[:top_k], -1)
        assert nucleus[row] == int((best.cumsum(-1) < 0.5).sum()) + 1
