"""The vote before a step that engines make together: how many tokens each brings, and whether it has more."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fourfold.contracts.step_part import StepVote

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator


class Outcome(NamedTuple):
    """The same on every rank; every decision about the step follows from it."""

    tokens: list[int]
    """Of each engine."""
    vote: StepVote
    cut: bool
    """Whether all cut their tokens in two, since all want to and can."""


class Ballot:
    """Holds votes among the ranks of an EP group; those of one engine vote alike."""

    def __init__(self, link: Communicator, ranks_per_engine: int) -> None:
        """``link`` moves tensors on the CPU; ranks of an engine are neighbours in it."""
        self._link = link
        engine, place = divmod(link.rank, ranks_per_engine)
        self._engine = engine if place == 0 else None
        """Whose row this rank fills in; None: its engine's first rank does."""
        # Memory that is kept, filled through numpy, and added up in place: all else takes longer than the vote itself.
        self._rows = torch.zeros(link.world_size // ranks_per_engine, 4, dtype=torch.int32)
        self._numbers = self._rows.numpy()

    def hold(self, num_tokens: int, vote: StepVote, *, wants_cut: bool) -> Outcome:
        """Every rank must call this, as often as the others."""
        self._numbers.fill(0)
        if self._engine is not None:
            self._numbers[self._engine] = num_tokens, vote.has_work, vote.may_pause, wants_cut
        rows = self._link.all_reduce(self._rows).tolist()
        reduced = StepVote(has_work=any(row[1] for row in rows), may_pause=all(row[2] for row in rows))
        return Outcome([row[0] for row in rows], reduced, cut=all(row[0] > 1 and row[3] for row in rows))
