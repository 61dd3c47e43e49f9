from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.errors import ConfigError
from fourfold.models.description import MixtureDescription
from fourfold.plugins import load_plugins
from fourfold.selection import select
from fourfold.testing import moe_cases as cases
from fourfold.testing.moe import MoEConformance
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.placement import Linear
from fourfold_moe_ep.settings import ExpertParallelSettings

Pool = Callable[[int], RankPool]
MIXTURE = MixtureDescription(num_experts=7, top_k=3, intermediate_size=24)


class TestSums(MoEConformance):
    name = "ep"
    comm = "shm"


class TestSlots(MoEConformance):
    name = "ep"
    comm = "shm"
    backends = {"all_to_all": "shm"}
    world_sizes = (2, 3)


class TestGathered(MoEConformance):
    name = "ep"
    comm = "gloo"
    backends = {"all_to_all": "allgather_reducescatter"}
    world_sizes = (2,)


class TestExchanged(MoEConformance):
    name = "ep"
    comm = "shm"
    backends = {"all_to_all": "all_to_all_single", "expert_placement": "round-robin"}
    world_sizes = (2, 3)


def experts_read(rank: Rank, redundant: int, **backends: Any) -> list[int]:
    """Which of seven experts a rank reads, once it is known to compute what it should."""
    given = {**backends, "parallel_layer": "moe=ep", "comm": "shm"}
    settings = {"moe-ep": ExpertParallelSettings(redundant_experts=redundant)}
    tensors = cases.random_tensors(MIXTURE, seed=1)
    with cases.grouped(rank, given) as group:
        context = cases.context_of(group, given, MIXTURE, plugins=settings)
        layer, slices = cases.build_from(context, given, tensors)
        for count in (1, 2, 30):
            x = cases.torch.randn(count, cases.HIDDEN, generator=cases.torch.Generator().manual_seed(count))
            cases.check(layer(x.clone()), cases.dense(MIXTURE, tensors, x))
    return sorted({int(name.split(".")[1]) for name in slices if name.startswith("experts") and slices[name].num_read})


def placed(rank: Rank, placement: str) -> list[int]:
    return experts_read(rank, 0, expert_placement=placement)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("linear", [[0, 1, 2], [3, 4], [5, 6]]), ("round-robin", [[0, 3, 6], [1, 4], [2, 5]])],
)
def test_placements_say_who_reads_what(rank_pool: Pool, placement: str, expected: list[list[int]]) -> None:
    assert rank_pool(3).run(placed, placement) == expected


def misplaced(rank: Rank, owners: list[int]) -> str:
    """What is said to a placement with an answer of its own."""
    right, Linear.place = Linear.place, lambda self, num_physical, num_ranks: tuple(owners)  # type: ignore[assignment]
    try:
        return str(placed(rank, "linear"))
    except ConfigError as error:
        return str(error)
    finally:
        Linear.place = right  # type: ignore[method-assign]


@pytest.mark.parametrize("owners", [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0], [0, -1, 0, 1, 0, 1, 0]])
def test_experts_are_on_ranks_that_are_there(rank_pool: Pool, owners: list[int]) -> None:
    said = rank_pool(2).run(misplaced, owners)
    expected = (
        f"expert placement 'linear' puts experts on ranks {owners}; it is to give a rank from 0 to 1 for each of 7"
    )
    assert said == [expected] * 2


def test_a_rank_may_have_most_experts_or_none(rank_pool: Pool) -> None:
    assert rank_pool(2).run(misplaced, [1, 0, 1, 1, 1, 1, 1]) == ["[1]", "[0, 2, 3, 4, 5, 6]"]
    assert rank_pool(2).run(misplaced, [0] * 7) == ["[0, 1, 2, 3, 4, 5, 6]", "[]"]


def copied(rank: Rank, all_to_all: str) -> list[int]:
    return experts_read(rank, 3, all_to_all=all_to_all)


@pytest.mark.parametrize("all_to_all", ["auto", "shm"])
def test_copies_of_experts_share_their_tokens(rank_pool: Pool, all_to_all: str) -> None:
    # physical experts 7, 8 and 9 are second copies of 0, 1 and 2
    assert rank_pool(2).run(copied, all_to_all) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]


@pytest.mark.parametrize(("asked", "expected"), [(False, "tp"), (True, "ep")])
def test_the_flag_chooses_the_layer(asked: bool, expected: str) -> None:
    entries = {name: entry for (kind, name), entry in load_plugins().parallel_layers().items() if kind == "moe"}
    config = EngineConfig(parallel=ParallelConfig(enable_expert_parallel=asked))
    assert select("moe parallel layer", entries, "auto", config).entry.name == expected
    assert select("moe parallel layer", entries, "ep", config).entry.name == "ep"
