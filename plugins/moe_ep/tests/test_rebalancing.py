from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fourfold.contracts.mixture import ExpertMap, RebalancerContext
from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.models.description import MixtureDescription
from fourfold.testing import moe_cases as cases
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.expert_copies import map_of
from fourfold_moe_ep.expert_moves import Move, moves_of, settle, spread_places
from fourfold_moe_ep.planner import Planner
from fourfold_moe_ep.rebalancer import GreedyRebalancer
from fourfold_moe_ep.rebalancing import pays
from fourfold_moe_ep.settings import ExpertParallelSettings

Pool = Callable[[int], RankPool]
NUM_LAYERS = 3
MIXTURE = MixtureDescription(num_experts=7, top_k=3, intermediate_size=24)
TENSORS = cases.random_tensors(MIXTURE, seed=1)
COMM = {"comm": "shm"}


def build(group: GroupCoordinator, all_to_all: str, *, interval: int = 1000, gain: float = 0.05) -> list[Any]:
    """Layers over one spread, loaded alike; three redundant experts."""
    backends = {"all_to_all": all_to_all, "parallel_layer": "moe=ep", "comm": "shm"}
    settings = ExpertParallelSettings(redundant_experts=3, rebalance_interval=interval, rebalance_gain=gain)
    context = cases.context_of(group, backends, MIXTURE, plugins={"moe-ep": settings})
    return [cases.build_from(context, backends, TENSORS)[0] for _ in range(NUM_LAYERS)]


def noise(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, cases.HIDDEN, generator=torch.Generator().manual_seed(seed))


def random_map(generator: np.random.Generator) -> NDArray[np.int32]:
    """[L, 10]: every one of 7 experts once at least, anywhere."""
    rows = [[*range(7), *generator.integers(0, 7, 3).tolist()] for _ in range(NUM_LAYERS)]
    return np.array([generator.permutation(row) for row in rows], np.int32)


def survives_maps(rank: Rank, all_to_all: str, num_maps: int) -> list[float]:
    """Change to random maps while tokens flow, and compare with the whole after every step."""
    generator = np.random.default_rng(3)
    x = noise(9)
    expected = cases.dense(MIXTURE, TENSORS, x)
    with cases.grouped(rank, COMM) as group:
        layers = build(group, all_to_all)
        rebalancing = layers[0]._spread._rebalancing
        assert rebalancing is not None
        for _ in range(num_maps):
            maps = random_map(generator)
            rebalancing.start(maps)
            while rebalancing.moving:
                layers[0]._spread.end_step()
                for layer in layers:
                    cases.check(layer(x), expected)
            for layer, row in zip(layers, maps):
                assert sorted(layer._held.logical.tolist()) == sorted(row.tolist())
        return [rebalancing.counters[name] for name in ("expert_moves", "expert_move_failures")]


@pytest.mark.parametrize("all_to_all", ["auto", "shm"])
def test_a_hundred_random_maps_change_no_output(rank_pool: Pool, all_to_all: str) -> None:
    (moves, failures), other = rank_pool(2).run(survives_maps, all_to_all, 100)
    assert [moves, failures] == other
    assert moves > 1000
    assert failures == 0


def cannot_read(rank: Rank) -> list[Any]:
    """Rank 1 cannot read an expert of the second layer: (maps that are as asked for, moves, failures)."""
    generator = np.random.default_rng(4)
    x = noise(5)
    with cases.grouped(rank, COMM) as group:
        layers = build(group, "auto")
        rebalancing = layers[0]._spread._rebalancing
        assert rebalancing is not None

        def broken(expert: int, part: str) -> torch.Tensor:
            raise RuntimeError("out of memory")

        if rank.rank == 1:
            layers[1]._held.experts.matrix = broken  # type: ignore[method-assign]
        maps = random_map(generator)
        before = layers[1]._held.logical.tolist()
        rebalancing.start(maps)
        while rebalancing.moving:
            layers[0]._spread.end_step()
        as_asked = [sorted(one._held.logical.tolist()) == sorted(row.tolist()) for one, row in zip(layers, maps)]
        assert layers[1]._held.logical.tolist() == before
        for layer in layers:
            cases.check(layer(x), cases.dense(MIXTURE, TENSORS, x))
        return [as_asked[0], as_asked[2], rebalancing.counters["expert_move_failures"]]


def test_a_layer_that_cannot_move_stays_on_all_ranks(rank_pool: Pool) -> None:
    assert rank_pool(2).run(cannot_read) == [[True, True, 1.0]] * 2


def rebalances(rank: Rank, all_to_all: str) -> list[float]:
    """Tokens of which most go to the same experts, until experts have moved."""
    generator = torch.Generator().manual_seed(0)
    with cases.grouped(rank, COMM) as group:
        layers = build(group, all_to_all, interval=5, gain=0.05)
        # experts 3 and 4 have one copy each, both on rank 0
        favourite = TENSORS["router.weight"][3] + TENSORS["router.weight"][4]
        rebalancing = layers[0]._spread._rebalancing
        assert rebalancing is not None
        assert layers[0]._spread.report() == {}
        seen = []
        for _ in range(20):
            x = 0.4 * torch.randn(32, cases.HIDDEN, generator=generator) + favourite
            for layer in layers:
                layer(x)
            layers[0]._spread.end_step()
            seen.append(rebalancing.counters["expert_balancedness"])
        report = layers[0]._spread.report()["experts"]
        asked = report["window_steps"] * 32 * MIXTURE.top_k
        assert report["window_steps"] % 5 == 0
        assert [sum(row) for row in report["load"]] == [asked] * NUM_LAYERS
        assert [sum(row) for row in report["rank_load"]] == pytest.approx([asked] * NUM_LAYERS, abs=0.2)
        assert {max(row) for row in report["load"]} == {max(row[3], row[4]) for row in report["load"]}
        assert report["balancedness"] > seen[4] + 0.05
        return [seen[4], seen[-1], rebalancing.counters["expert_rebalances"], rebalancing.counters["expert_moves"]]


@pytest.mark.parametrize("all_to_all", ["auto", "shm"])
def test_hot_experts_are_copied_and_all_ranks_count_alike(rank_pool: Pool, all_to_all: str) -> None:
    first, other = rank_pool(2).run(rebalances, all_to_all)
    assert first == other
    before, after, num_rebalances, moves = first
    assert after > before + 0.05
    assert num_rebalances >= 1
    assert moves > 0


class Shuffling:
    """Has another plan on every rank, and each time."""

    def balance(self, load: NDArray[np.float64], num_ranks: int, num_slots: int) -> ExpertMap:
        balanced = GreedyRebalancer(RebalancerContext()).balance(load, num_ranks, num_slots).physical_to_logical
        return map_of(np.random.default_rng().permuted(balanced, axis=1), load.shape[1])


class Planless:
    def balance(self, load: NDArray[np.float64], num_ranks: int, num_slots: int) -> ExpertMap:
        raise RuntimeError("no plan today")


ASKED = 4


def is_asked(rank: Rank, kind: str) -> list[float]:
    """Steps with a rebalancer that is asked whenever nothing moves: [failures of plans, of moves]."""
    x, expected = noise(9), cases.dense(MIXTURE, TENSORS, noise(9))
    with cases.grouped(rank, COMM) as group:
        layers = build(group, "auto", interval=1, gain=0.0)
        spread = layers[0]._spread
        odd = {"shuffling": Shuffling, "planless": Planless}[kind]()
        spread._rebalancing._planner = Planner(odd, spread.owners, group.world_size)
        for _ in range(ASKED):
            for layer in layers:
                cases.check(layer(x), expected)
            spread.end_step()
            while spread._rebalancing.moving:
                spread.end_step()
        maps = torch.tensor(np.stack([layer._held.logical for layer in layers]))
        assert torch.equal(group.all_reduce(maps.clone()), 2 * maps), "all ranks have the same maps"
        return [spread._rebalancing.counters[f"expert_{name}_failures"] for name in ("rebalance", "move")]


def test_ranks_take_one_plan_though_each_would_have_another(rank_pool: Pool) -> None:
    assert rank_pool(2).run(is_asked, "shuffling") == [[0, 0]] * 2


def test_steps_go_on_where_there_is_no_plan(rank_pool: Pool) -> None:
    assert rank_pool(2).run(is_asked, "planless") == [[ASKED, 0]] * 2


def test_experts_that_stay_on_a_rank_stay_in_their_place() -> None:
    owners = [0, 0, 0, 1, 1, 1]
    old, new = np.array([0, 1, 2, 3, 4, 0], np.int32), np.array([2, 0, 3, 1, 4, 1], np.int32)
    settled = settle(new, old, owners)
    assert settled.tolist() == [0, 3, 2, 1, 4, 1]
    assert moves_of(old, settled, owners) == [Move(3, 1), Move(1, 3), Move(1, 5)]
    assert moves_of(old, np.array([0, 1, 2, 3, 4, 4], np.int32), owners) == [Move(4, 5)]


def test_places_of_ranks_are_where_the_placement_has_them() -> None:
    balanced = np.array([[5, 6, 7, 8]], np.int32)
    assert spread_places(balanced, [0, 1, 0, 1]).tolist() == [[5, 7, 6, 8]]
    assert spread_places(balanced, [0, 0, 1, 1]).tolist() == balanced.tolist()


@pytest.mark.parametrize(
    ("before", "after", "seconds", "nbytes", "expected"),
    [(0.5, 1.0, 100.0, 1e9, True), (0.5, 1.0, 1.0, 1e9, False), (0.95, 0.99, 100.0, 1.0, False)],
)
def test_experts_move_only_if_it_pays(
    before: float, after: float, seconds: float, nbytes: float, expected: bool
) -> None:
    assert pays(before=before, after=after, least_gain=0.05, seconds=seconds, nbytes=nbytes) is expected
