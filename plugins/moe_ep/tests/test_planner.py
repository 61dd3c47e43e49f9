"""A rebalancer's plan is taken where it can be, and is none otherwise: whatever it does, nothing ends with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fourfold.contracts.mixture import ExpertMap, RebalancerContext
from fourfold_moe_ep.planner import Planner
from fourfold_moe_ep.rebalancer import GreedyRebalancer

OWNERS = [0, 1, 0, 1, 0]
LOAD = np.array([[4.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 9.0]])


class Odd:
    """Answers as greedy does, but for what ``change`` makes of its map."""

    def __init__(self, change: Callable[[NDArray[np.int32]], Any]) -> None:
        self._change = change

    def balance(self, load: NDArray[np.float64], num_ranks: int, num_slots: int) -> ExpertMap:
        right = GreedyRebalancer(RebalancerContext()).balance(load, num_ranks, num_slots)
        return replace(right, physical_to_logical=self._change(right.physical_to_logical))


def no_plan(found: NDArray[np.int32]) -> Any:
    raise RuntimeError("no plan today")


WRONG: dict[str, tuple[Callable[[NDArray[np.int32]], Any], str]] = {
    "raises": (no_plan, "RuntimeError: no plan today"),
    "too few places": (lambda found: found[:, 1:], r"its map is int32 \[2, 4\], not integers \[2, 5\]"),
    "no numbers": (lambda found: found / 2, r"its map is float64 \[2, 5\]"),
    "an expert too many": (lambda found: found + 1, "its map names experts from 1 to 4, of 4"),
    "an expert too few": (lambda found: found * 0, "expert 1 has no copy in layer 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_none(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, message = WRONG[name]
    with caplog.at_level(logging.WARNING):
        assert Planner(Odd(change), OWNERS, 2).plan(LOAD) is None
    assert "experts stay where they are" in caplog.text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(caplog.text)


def test_a_right_answer_is_where_the_placement_has_it() -> None:
    found = Planner(GreedyRebalancer(RebalancerContext()), OWNERS, 2).plan(LOAD)
    balanced = GreedyRebalancer(RebalancerContext()).balance(LOAD, 2, 5).physical_to_logical
    assert found is not None
    assert found[:, [0, 2, 4, 1, 3]].tolist() == balanced.tolist()


def test_who_does_not_return_is_not_asked_again() -> None:
    begun, over, asked = threading.Event(), threading.Event(), []

    def wait(found: NDArray[np.int32]) -> NDArray[np.int32]:
        asked.append(1)
        begun.set()
        over.wait(60)
        return found

    planner = Planner(Odd(wait), OWNERS, 2, seconds=0.01)
    try:
        assert planner.plan(LOAD) is None
        assert begun.wait(10)
        assert [planner.plan(LOAD) for _ in range(2)] == [None] * 2
        assert len(asked) == 1
    finally:
        over.set()
