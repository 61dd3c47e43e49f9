from __future__ import annotations

import time

import numpy as np
import pytest

from fourfold.errors import ConfigError, EngineError
from fourfold.plugins import load_plugins
from fourfold.testing.routing import RoutingSimulator, expert_load
from fourfold_moe_ep.expert_copies import first_map, map_of
from fourfold_moe_ep.placement import Linear
from fourfold_moe_ep.rebalancer import GreedyRebalancer, balancedness


@pytest.mark.parametrize("num_experts", [64, 128, 256])
@pytest.mark.parametrize("kind", ["zipf", "lognormal"])
def test_one_redundant_expert_a_rank_balances_eight(kind: str, num_experts: int) -> None:
    load = expert_load(kind, 20, num_experts)
    num_slots = num_experts + 8
    owners = Linear().place(num_slots, 8)
    balanced = load_plugins().rebalancers()["greedy"].build(None).balance(load, 8, num_slots)
    assert balancedness(load, balanced, owners, 8) >= 0.98
    assert balancedness(load, first_map(20, num_experts, num_slots), owners, 8) < 0.9


@pytest.mark.parametrize("kind", ["zipf", "lognormal", "hot"])
def test_what_was_asked_for_balances_what_is_asked_for_next(kind: str) -> None:
    num_experts, num_slots, num_layers = 64, 72, 4
    owners = Linear().place(num_slots, 8)
    simulator = RoutingSimulator(expert_load(kind, num_layers, num_experts), top_k=4)

    def window() -> np.ndarray:
        ids = [simulator.route(layer, 8192)[0].flatten().numpy() for layer in range(num_layers)]
        return np.stack([np.bincount(asked, minlength=num_experts) for asked in ids]).astype(np.float64)

    balanced = GreedyRebalancer().balance(window(), 8, num_slots)
    asked_next = window()
    before = balancedness(asked_next, first_map(num_layers, num_experts, num_slots), owners, 8)
    assert balancedness(asked_next, balanced, owners, 8) > max(0.9, before)


def test_a_large_model_is_solved_quickly() -> None:
    load = expert_load("zipf", 60, 256)
    started = time.process_time()
    GreedyRebalancer().balance(load, 32, 256 + 32)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(8, 3, 8), (8, 3, 11), (5, 2, 15), (7, 7, 9)])
def test_every_expert_has_a_copy_and_the_map_is_consistent(num_experts: int, num_ranks: int, num_slots: int) -> None:
    load = expert_load("lognormal", 4, num_experts)
    found = GreedyRebalancer().balance(load, num_ranks, num_slots)
    again = GreedyRebalancer().balance(load.copy(), num_ranks, num_slots)
    assert (found.physical_to_logical == again.physical_to_logical).all()
    assert found.counts.min() >= 1
    assert (found.counts.sum(axis=1) == num_slots).all()
    for layer in range(4):
        for expert in range(num_experts):
            copies = [one for one in found.logical_to_physical[layer, expert].tolist() if one >= 0]
            assert len(copies) == len(set(copies)) == found.counts[layer, expert]
            assert (found.physical_to_logical[layer, copies] == expert).all()


def test_without_load_nothing_is_unbalanced() -> None:
    load = np.zeros((3, 8))
    found = GreedyRebalancer().balance(load, 2, 10)
    assert balancedness(load, found, Linear().place(10, 2), 2) == 1.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 experts do not fit 7 slots"):
        GreedyRebalancer().balance(np.ones((1, 8)), 2, 7)
    with pytest.raises(EngineError, match="expert 1 has no copy in layer 1"):
        map_of(np.array([[0, 1, 2], [0, 2, 2]], np.int32), 3)
