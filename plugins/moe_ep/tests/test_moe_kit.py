"""The kit of moe layers finds one that is nearly right on every rank, and one that keeps its first weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.contracts.parallel_layer import ParallelLayer, TensorSlices
from fourfold.entries import ParallelLayerContext
from fourfold.testing import moe_cases as cases
from fourfold.testing.moe import MoEConformance
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankError, RankPool

BACKENDS = {"parallel_layer": "moe=ep", "comm": "shm"}


class Differing:
    """Every rank is wrong by a little more than the one before."""

    def __init__(self, context: ParallelLayerContext, right: ParallelLayer) -> None:
        self._right, self._rank = right, context.rank

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        self._right.load(parameter, tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._right(x) + 1e-6 * self._rank


class Faithful:
    """Takes each tensor once."""

    def __init__(self, context: ParallelLayerContext, right: ParallelLayer) -> None:
        self._right = right

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """All have been loaded."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._right(x)


WRONG = {one.__name__: one for one in (Differing, Faithful)}
BUILD = cases.build_from


def runs(rank: Rank, wrong: str, case: str) -> Any:
    """What a case of the kit gives where the layers are ``wrong``."""

    def build(context: ParallelLayerContext, *args: Any) -> tuple[Any, Any]:
        right, slices = BUILD(context, *args)
        return WRONG[wrong](context, right), slices

    cases.build_from = build
    try:
        return getattr(cases, case)(rank, BACKENDS)
    finally:
        cases.build_from = BUILD


@pytest.mark.parametrize(
    ("wrong", "test", "message"),
    [
        ("Differing", MoEConformance.test_it_agrees_with_one_dense_process, "every rank has the same bits"),
        ("Faithful", MoEConformance.test_weights_may_be_loaded_again, "Tensor-likes are not close"),
    ],
)
def test_what_is_wrong_is_caught(
    rank_pool: Callable[[int], RankPool], wrong: str, test: Callable[..., None], message: str
) -> None:
    def run(case: Callable[..., Any]) -> list[Any]:
        return [rank_pool(2).run(runs, wrong, case.__name__)]

    with pytest.raises((AssertionError, RankError), match=message):
        test(None, run)
