from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import AllToAllContext
from fourfold.errors import EngineError, Unsupported
from fourfold.plugins import load_plugins
from fourfold.testing import all_to_all_cases as cases
from fourfold.testing.all_to_all import AllToAllConformance
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool

Pool = Callable[[int], RankPool]


class TestGatheredOverShm(AllToAllConformance):
    name = "allgather_reducescatter"
    communicator = "shm"


class TestExchangedOverGloo(AllToAllConformance):
    name = "all_to_all_single"
    communicator = "gloo"


class TestSlots(AllToAllConformance):
    name = "shm"
    communicator = "shm"


class TestSlotsOfThree(AllToAllConformance):
    name = "shm"
    communicator = "shm"
    world_size = 3


def results(rank: Rank, names: list[str]) -> list[bool]:
    """Whether each of them gives the bits of the first."""
    step = cases.make_step(rank.rank, [23, 31, 7], 2 * rank.world_size + 1)
    found = []
    with connected(rank, "shm", "cpu") as communicator:
        for name in names:
            all_to_all = cases.build_over(communicator, name, torch.device("cpu"))
            found.append(cases.travel(all_to_all, step).clone())
            all_to_all.close()
    return [torch.equal(one, found[0]) for one in found]


def test_all_of_them_give_the_same_bits(rank_pool: Pool) -> None:
    names = ["shm", "allgather_reducescatter", "all_to_all_single"]
    assert rank_pool(3).run(results, names) == [[True] * 3] * 3


def poisoned(rank: Rank) -> None:
    """A step through rows that held NaN before."""
    with cases.built(rank, "shm", "shm", "cpu", top_k=1) as all_to_all:
        for rows in all_to_all._rows[0]:  # type: ignore[attr-defined]
            rows.x.fill_(torch.nan)
            rows.partial.fill_(torch.nan)
        all_to_all._memories[0].barrier()  # type: ignore[attr-defined]
        step = cases.make_step(rank.rank, [20] * rank.world_size, 2 * rank.world_size + 1, top_k=1)
        all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes)
        arrived = all_to_all.dispatch_receive()
        holes = (arrived.ids < 0).all(1)
        assert holes.any()
        assert arrived.x[holes].isnan().all()
        all_to_all.combine_send(cases.apply_experts(arrived, rank.rank, rank.world_size))
        cases.check(all_to_all.combine_receive(), step, rank.world_size)


def test_slots_that_nobody_fills_stay_untouched(rank_pool: Pool) -> None:
    rank_pool(2).run(poisoned)


def refused(rank: Rank) -> list[str]:
    """What is said to too many tokens, and to ranks that share no memory."""
    errors = []
    with cases.built(rank, "shm", "shm", "cpu") as all_to_all:
        step = cases.make_step(rank.rank, [41] * rank.world_size, 2 * rank.world_size + 1)
        try:
            all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes)
        except EngineError as error:
            errors.append(str(error))
    with connected(rank, "gloo", "cpu") as communicator:
        context = AllToAllContext(
            config=EngineConfig(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            communicator=communicator,
            hidden_size=8,
            top_k=1,
            num_experts=2,
            owners=torch.tensor([0, 1], dtype=torch.int32),
            max_tokens=4,
        )
        try:
            load_plugins().all_to_alls()["shm"].build(context)
        except Unsupported as error:
            errors.append(str(error))
    return errors


def test_slots_say_what_they_cannot_do(rank_pool: Pool) -> None:
    for tokens, memory in rank_pool(2).run(refused):
        assert "41 tokens on rank" in tokens
        assert "no memory that ranks share" in memory


@pytest.mark.parametrize(
    ("name", "expected"), [("linear", (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)), ("round-robin", (0, 1, 2, 0, 1, 2, 0, 1, 2, 0))]
)
def test_experts_are_placed_and_the_remainder_is_the_first_ranks(name: str, expected: tuple[int, ...]) -> None:
    assert load_plugins().expert_placements()[name].build(None).place(10, 3) == expected
