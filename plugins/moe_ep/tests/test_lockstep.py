"""Ranks of two engines that share experts: each has tokens of its own, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fourfold.contracts.step_part import StepVote
from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.testing import mixture_cases as cases
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.ballot import Ballot, Outcome
from fourfold_moe_ep.layer import ExpertParallelLayer

Pool = Callable[[int], RankPool]
WORK = StepVote(has_work=True, may_pause=False)
IDLE = StepVote(has_work=False, may_pause=True)
TOKENS = [(5, 9), (0, 3), (64, 0), (0, 0), (1, 1), (0, 1)]
"""Of engine 0 and of engine 1, step by step."""


def votes(rank: Rank) -> None:
    """Ranks 0 and 1 are one engine, ranks 2 and 3 another."""
    engine = rank.rank // 2
    with connected(rank, "shm", "cpu") as communicator:
        ballot = Ballot(communicator, ranks_per_engine=2)
        assert ballot.hold([7, 0][engine], [WORK, IDLE][engine]) == Outcome([7, 0], WORK)
        assert ballot.hold(0, IDLE) == Outcome([0, 0], IDLE)


def test_all_ranks_see_the_same_outcome(rank_pool: Pool) -> None:
    rank_pool(4).run(votes)


def steps_together(rank: Rank, all_to_all: str) -> list[bool]:
    """Two layers, through steps in which engines have many tokens, few, or none: whether anyone had work."""
    description = cases.MIXTURES["shared"]
    with connected(rank, "shm", "cpu") as communicator:
        group = GroupCoordinator(name="ep", ranks=(0, 1), rank=rank.rank, communicator=communicator)
        alone = cases.layer_context(description, all_to_all=all_to_all)
        context = replace(alone, expert_group=group)
        layers = [ExpertParallelLayer(context) for _ in range(2)]
        for layer in layers:
            cases.fill(layer, description)
        (part,) = context.shared.values()
        found = []
        for seed, counts in enumerate(TOKENS):
            count = counts[rank.rank]
            found.append(part.begin_step(count, WORK if count else IDLE).has_work)
            if count:
                x = cases.tokens(count, seed + 100 * rank.rank)
                for layer in layers:
                    torch.testing.assert_close(layer(x), cases.expected(description, x), rtol=1e-5, atol=1e-5)
            part.end_step()
        return found


def test_an_engine_without_tokens_serves_the_others(rank_pool: Pool) -> None:
    for all_to_all in ("auto", "all_to_all_single", "allgather_reducescatter"):
        assert rank_pool(2).run(steps_together, all_to_all) == [[True, True, True, False, True, True]] * 2
