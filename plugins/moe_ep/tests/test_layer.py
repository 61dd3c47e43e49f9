from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.errors import ConfigError
from fourfold.plugins import load_plugins
from fourfold.selection import select
from fourfold.testing import mixture_cases as cases
from fourfold.testing.communicator_cases import connected
from fourfold.testing.mixture import MoEConformance
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.layer import ExpertParallelLayer
from fourfold_moe_ep.settings import ExpertParallelSettings

Pool = Callable[[int], RankPool]


class TestSums(MoEConformance):
    name = "ep"
    communicator = "shm"


class TestSlots(MoEConformance):
    name = "ep"
    communicator = "shm"
    backends = {"all_to_all": "shm"}


class TestGathered(MoEConformance):
    name = "ep"
    communicator = "gloo"
    backends = {"all_to_all": "allgather_reducescatter"}


class TestExchangedOfThree(MoEConformance):
    name = "ep"
    communicator = "shm"
    world_size = 3
    backends = {"all_to_all": "all_to_all_single", "expert_placement": "round-robin"}


def neighbours_apart(rank: Rank) -> list[int]:
    return cases.agrees(rank, "ep", "shm", "plain", {"expert_placement": "round-robin"})


def test_placements_say_who_reads_what(rank_pool: Pool) -> None:
    assert rank_pool(3).run(neighbours_apart) == [[0, 3, 6], [1, 4], [2, 5]]


def copied(rank: Rank, all_to_all: str) -> list[int]:
    """Three redundant experts."""
    settings = {"moe-ep": ExpertParallelSettings(redundant_experts=3)}
    with connected(rank, "shm", "cpu") as communicator:
        context = cases.layer_context(cases.PLAIN, communicator, plugins=settings, all_to_all=all_to_all)
        layer = ExpertParallelLayer(context)
        read = cases.fill(layer, cases.PLAIN)
        cases.check(layer, cases.PLAIN)
        return read


@pytest.mark.parametrize("all_to_all", ["auto", "shm"])
def test_copies_of_experts_share_their_tokens(rank_pool: Pool, all_to_all: str) -> None:
    # physical experts 7, 8 and 9 are second copies of 0, 1 and 2
    assert rank_pool(2).run(copied, all_to_all) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]


def test_it_says_what_it_is_made_of() -> None:
    layer = ExpertParallelLayer(cases.layer_context(cases.PLAIN))
    assert layer.backends == {"experts": "loop", "expert_placement": "linear", "all_to_all": "none"}


def refused(rank: Rank) -> str:
    with connected(rank, "shm", "cpu") as communicator, pytest.raises(ConfigError) as error:
        ExpertParallelLayer(cases.layer_context(replace(cases.PLAIN, num_experts=1, top_k=1), communicator))
    return str(error.value)


def test_fewer_experts_than_ranks_are_refused(rank_pool: Pool) -> None:
    assert set(rank_pool(2).run(refused)) == {
        "1 experts cannot be spread over 2 ranks; take fewer ranks, or --moe-ep-redundant-experts to copy experts"
    }


@pytest.mark.parametrize(("asked", "expected"), [(False, "tp"), (True, "ep")])
def test_the_flag_chooses_the_layer(asked: bool, expected: str) -> None:
    entries = {name: entry for (kind, name), entry in load_plugins().parallel_layers().items() if kind == "moe"}
    config = EngineConfig(parallel=ParallelConfig(enable_expert_parallel=asked))
    assert select("moe parallel layer", entries, "auto", config).entry.name == expected
    assert select("moe parallel layer", entries, "ep", config).entry.name == "ep"
