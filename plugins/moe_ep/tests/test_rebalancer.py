from __future__ import annotations

import time

import numpy as np
import pytest

from fourfold.contracts.mixture import RebalancerContext
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
    balanced = load_plugins().rebalancers()["greedy"].build(RebalancerContext()).balance(load, 8, num_slots)
    assert balancedness(load, balanced, owners, 8) >= 0.98
    assert balancedness(load, first_map(20, num_experts, num_slots), owners, 8) < 0.9


@pytest.mark.parametrize("kind", ["zipf", "lognormal"])
def test_experts_of_a_group_stay_on_one_host(kind: str) -> None:
    load = expert_load(kind, 20, 256)
    owners = np.asarray(Linear().place(256 + 32, 16))
    context = RebalancerContext(num_groups=8, hosts=(0,) * 8 + (1,) * 8)
    balanced = GreedyRebalancer(context).balance(load, 16, 256 + 32)
    homes = owners // 8
    for row in balanced.physical_to_logical:
        for group in range(8):
            assert len(set(homes[row // 32 == group])) == 1
    everywhere = GreedyRebalancer(RebalancerContext()).balance(load, 16, 256 + 32)
    first = first_map(20, 256, 256 + 32)
    found = [balancedness(load, one, owners.tolist(), 16) for one in (first, balanced, everywhere)]
    assert found == sorted(found)
    # What is lost is between the hosts, whose groups cannot be cut.
    layers = np.arange(20)[:, None]
    share = load[layers, balanced.physical_to_logical] / balanced.counts[layers, balanced.physical_to_logical]
    apart = share.reshape(20, 2, 144).sum(axis=2)
    assert found[1] >= 0.97 * apart.mean(axis=1).sum() / apart.max(axis=1).sum()


@pytest.mark.parametrize(
    ("num_groups", "hosts", "num_slots"),
    [
        (1, (0, 0, 1, 1), 72),
        (3, (0, 0, 1, 1), 72),
        (8, (0, 0, 0, 1), 72),
        (8, (0, 1, 0, 1), 72),
        (8, (0, 0, 1, 1), 70),
        (8, (0, 0, 0, 0), 72),
        (8, (), 72),
    ],
)
def test_what_hosts_cannot_share_out_evenly_goes_anywhere(
    num_groups: int, hosts: tuple[int, ...], num_slots: int
) -> None:
    load = expert_load("zipf", 4, 64)
    found = GreedyRebalancer(RebalancerContext(num_groups=num_groups, hosts=hosts)).balance(load, 4, num_slots)
    anywhere = GreedyRebalancer(RebalancerContext()).balance(load, 4, num_slots)
    assert (found.physical_to_logical == anywhere.physical_to_logical).all()


@pytest.mark.parametrize("kind", ["zipf", "lognormal", "hot"])
def test_what_was_asked_for_balances_what_is_asked_for_next(kind: str) -> None:
    num_experts, num_slots, num_layers = 64, 72, 4
    owners = Linear().place(num_slots, 8)
    simulator = RoutingSimulator(expert_load(kind, num_layers, num_experts), top_k=4)

    def window() -> np.ndarray:
        ids = [simulator.route(layer, 8192)[0].flatten().numpy() for layer in range(num_layers)]
        return np.stack([np.bincount(asked, minlength=num_experts) for asked in ids]).astype(np.float64)

    balanced = GreedyRebalancer(RebalancerContext()).balance(window(), 8, num_slots)
    asked_next = window()
    before = balancedness(asked_next, first_map(num_layers, num_experts, num_slots), owners, 8)
    assert balancedness(asked_next, balanced, owners, 8) > max(0.9, before)


def test_a_large_model_is_solved_quickly() -> None:
    load = expert_load("zipf", 60, 256)
    started = time.process_time()
    GreedyRebalancer(RebalancerContext()).balance(load, 32, 256 + 32)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(8, 3, 8), (8, 3, 11), (5, 2, 15), (7, 7, 9)])
def test_every_expert_has_a_copy_and_the_map_is_consistent(num_experts: int, num_ranks: int, num_slots: int) -> None:
    load = expert_load("lognormal", 4, num_experts)
    found = GreedyRebalancer(RebalancerContext()).balance(load, num_ranks, num_slots)
    again = GreedyRebalancer(RebalancerContext()).balance(load.copy(), num_ranks, num_slots)
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
    found = GreedyRebalancer(RebalancerContext()).balance(load, 2, 10)
    assert balancedness(load, found, Linear().place(10, 2), 2) == 1.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 experts do not fit 7 slots"):
        GreedyRebalancer(RebalancerContext()).balance(np.ones((1, 8)), 2, 7)
    with pytest.raises(EngineError, match="expert 1 has no copy in layer 1"):
        map_of(np.array([[0, 1, 2], [0, 2, 2]], np.int32), 3)
