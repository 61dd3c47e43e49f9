"""Ranks of two engines that share experts: each has tokens of its own, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fourfold.contracts.step_part import StepPart, StepVote
from fourfold.distributed.ballot import Ballot, Outcome
from fourfold.models.description import MixtureDescription
from fourfold.testing import moe_cases as cases
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool

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
        assert ballot.hold([7, 0][engine], [WORK, IDLE][engine], wants_cut=True) == Outcome([7, 0], WORK, cut=False)
        assert ballot.hold(0, IDLE, wants_cut=False) == Outcome([0, 0], IDLE, cut=False)
        assert ballot.hold(2, WORK, wants_cut=True).cut
        assert not ballot.hold(2, WORK, wants_cut=engine == 0).cut
        assert not ballot.hold([2, 1][engine], WORK, wants_cut=True).cut


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
        layers: list[Any] = [cases.build_from(context, backends, tensors)[0] for _ in range(2)]
        parts = tuple(context.shared.values())
        found = []
        for seed, counts in enumerate(TOKENS):
            count = counts[rank.rank]
            found.append(begin(parts, count, WORK if count else IDLE, is_decode=False).has_work)
            if count:
                generator = torch.Generator().manual_seed(seed + 100 * rank.rank)
                x = torch.randn(count, cases.HIDDEN, generator=generator)
                for layer in layers:
                    cases.check(layer(x.clone()), cases.dense(mixture, tensors, x))
            for part in parts:
                part.end_step()
        return found


def begin(parts: Sequence[StepPart], count: int, vote: StepVote, *, is_decode: bool) -> StepVote:
    for part in parts:
        vote = part.begin_step(count, vote, is_decode=is_decode)
    return vote


def test_an_engine_without_tokens_serves_the_others(rank_pool: Pool) -> None:
    for all_to_all in ("auto", "all_to_all_single", "allgather_reducescatter"):
        assert rank_pool(2).run(steps_together, all_to_all) == [[True, True, True, False, True, True]] * 2


def overlaps(rank: Rank, all_to_all: str, comm: str) -> list[str]:
    """A step in two microbatches through two layers: the phases in the order in which they came."""
    backends = {"all_to_all": all_to_all, "parallel_layer": "moe=ep", "comm": comm}
    mixture = MixtureDescription(**cases.MIXTURES[-1])
    tensors = cases.random_tensors(mixture, seed=2)
    with cases.grouped(rank, backends) as group:
        context = cases.context_of(group, backends, mixture)
        parallel = replace(context.config.parallel, enable_dbo=True, dbo_prefill_tokens=4, dbo_decode_tokens=6)
        config = replace(context.config, parallel=parallel)
        context = replace(context, config=config, rank=0, world_size=1, communicator=None)
        layers: list[Any] = [cases.build_from(context, backends, tensors)[0] for _ in range(2)]
        parts = tuple(context.shared.values())
        trace = trace_phases(layers[0]._spread.wire)
        for counts in ((9, 4), (4, 11)):
            count = counts[rank.rank]
            assert begin(parts, count, WORK, is_decode=False) == WORK
            x = torch.randn(count, cases.HIDDEN, generator=torch.Generator().manual_seed(rank.rank))
            (turns,) = (turns for part in parts if (turns := part.take_turns(count)) is not None)
            halves = [x[: count - count // 2], x[count - count // 2 :]]
            found = torch.cat(turns([partial(through, layers, half) for half in halves]))
            cases.check(found, cases.dense(mixture, tensors, cases.dense(mixture, tensors, x)))
        for counts, is_decode in (((9, 3), False), ((9, 1), False), ((4, 4), True), ((9, 0), False)):
            count = counts[rank.rank]
            begin(parts, count, WORK if count else IDLE, is_decode=is_decode)
            assert not any(part.take_turns(count) for part in parts)
            if count:
                x = torch.randn(count, cases.HIDDEN)
                cases.check(layers[0](x.clone()), cases.dense(mixture, tensors, x))
                layers[1](x)
        return trace[:8]


def through(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def trace_phases(wire: Any) -> list[str]:
    """Notes each phase and its channel from now on."""
    trace: list[str] = []

    def note(name: str, phase: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, channel: int = 0, **kwargs: Any) -> Any:
            trace.append(f"{name} {channel}")
            return phase(*args, channel=channel, **kwargs)

        return noted

    for name in ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive"):
        setattr(wire, name, note(name, getattr(wire, name)))
    return trace


def test_one_microbatch_computes_while_the_other_travels(rank_pool: Pool) -> None:
    for all_to_all, comm in (("shm", "shm"), ("all_to_all_single", "gloo"), ("allgather_reducescatter", "shm")):
        found = rank_pool(2).run(overlaps, all_to_all, comm)
        expected = ["dispatch_send 0", "dispatch_send 1", "dispatch_receive 0", "combine_send 0"]
        expected += ["dispatch_receive 1", "combine_send 1", "combine_receive 0", "dispatch_send 0"]
        assert found == [expected] * 2
