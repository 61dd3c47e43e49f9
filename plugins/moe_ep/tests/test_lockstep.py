"""Ranks of two engines that share experts: each has tokens of its own, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fourfold.contracts.step_part import StepVote
from fourfold.models.description import MixtureDescription
from fourfold.testing import moe_cases as cases
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.ballot import Ballot, Outcome

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
    backends = {"all_to_all": all_to_all, "parallel_layer": "moe=ep", "comm": "shm"}
    mixture = MixtureDescription(**cases.MIXTURES[-1])
    tensors = cases.random_tensors(mixture, seed=2)
    with cases.grouped(rank, backends) as group:
        context = cases.context_of(group, backends, mixture)
        context = replace(context, rank=0, world_size=1, communicator=None)
        layers = [cases.build_from(context, backends, tensors)[0] for _ in range(2)]
        (part,) = context.shared.values()
        found = []
        for seed, counts in enumerate(TOKENS):
            count = counts[rank.rank]
            found.append(part.begin_step(count, WORK if count else IDLE).has_work)
            if count:
                generator = torch.Generator().manual_seed(seed + 100 * rank.rank)
                x = torch.randn(count, cases.HIDDEN, generator=generator)
                for layer in layers:
                    cases.check(layer(x.clone()), cases.dense(mixture, tensors, x))
            part.end_step()
        return found


def test_an_engine_without_tokens_serves_the_others(rank_pool: Pool) -> None:
    for all_to_all in ("auto", "all_to_all_single", "allgather_reducescatter"):
        assert rank_pool(2).run(steps_together, all_to_all) == [[True, True, True, False, True, True]] * 2
