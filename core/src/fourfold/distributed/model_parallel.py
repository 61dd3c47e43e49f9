"""The four groups of one rank, built once and handed on as one object; there is no ambient state to look them up in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fourfold.distributed.group_coordinator import GroupCoordinator

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.layout import ParallelLayout

GroupName = Literal["tp", "pp", "dp", "ep"]
Connect = Callable[[GroupName, tuple[int, ...], int], "Communicator"]
"""(group, its global ranks, this process' rank in it) -> a communicator; called for groups of several ranks only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallel:
    """Where one rank stands, and whom it talks to."""

    layout: ParallelLayout
    rank: int
    """Global."""
    tp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator

    def close(self) -> None:
        """Release all groups; idempotent."""
        for group in (self.tp, self.pp, self.dp, self.ep):
            group.close()


def initialize_model_parallel(layout: ParallelLayout, rank: int, connect: Connect) -> ModelParallel:
    """Build the groups of global ``rank``. All ranks must call this, since connecting is collective."""
    layout.coordinate(rank)
    return ModelParallel(
        layout=layout,
        rank=rank,
        tp=_group("tp", layout.tp_groups(), rank, connect),
        pp=_group("pp", layout.pp_groups(), rank, connect),
        dp=_group("dp", layout.dp_groups(), rank, connect),
        ep=_group("ep", layout.ep_groups(), rank, connect),
    )


def _group(name: GroupName, groups: list[list[int]], rank: int, connect: Connect) -> GroupCoordinator:
    ranks = next(tuple(group) for group in groups if rank in group)
    position = ranks.index(rank)
    communicator = connect(name, ranks, position) if len(ranks) > 1 else None
    return GroupCoordinator(name=name, ranks=ranks, rank=position, communicator=communicator)
