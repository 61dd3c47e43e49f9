"""The four groups of one rank, built once and handed on as one object; there is no ambient state to look them up in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fourfold.distributed.group_coordinator import GroupCoordinator

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.distributed.checked_communicator import CollectiveLog
    from fourfold.layout import ParallelLayout

GroupName = Literal["tp", "pp", "dp", "ep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLinks:
    """What connects the ranks of one group."""

    name: str
    """Of the communicator."""
    communicator: Communicator
    host: Communicator
    """Moves CPU tensors; the communicator itself where it does."""
    hosts: tuple[int, ...] = ()
    """A number for each rank, the same for ranks of one host; empty where nobody has asked."""


Connect = Callable[[GroupName, tuple[int, ...], int], GroupLinks]
"""(group, its global ranks, this process' rank in it) -> its links; called for groups of several ranks only."""


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
    log: CollectiveLog | None = None
    """Of the collectives that are compared between ranks, where they are."""

    @property
    def groups(self) -> tuple[GroupCoordinator, ...]:
        """All four."""
        return (self.tp, self.pp, self.dp, self.ep)

    @property
    def communicators(self) -> str:
        """What connects this rank, as ``--comm`` takes it; ``none`` for a rank alone."""
        names = {group.name: group.link for group in self.groups if group.link}
        if len(set(names.values())) <= 1:
            return next(iter(names.values()), "none")
        return ",".join(f"{group}={name}" for group, name in names.items())

    def begin_step(self, step: int) -> None:
        """Note which step runs, for messages about collectives."""
        if self.log is not None:
            self.log.step = step

    def close(self) -> None:
        """Release all groups; idempotent."""
        for group in self.groups:
            group.close()


def initialize_model_parallel(
    layout: ParallelLayout, rank: int, connect: Connect, *, log: CollectiveLog | None = None
) -> ModelParallel:
    """Build the groups of global ``rank``. All ranks must call this, since connecting is collective."""
    layout.coordinate(rank)
    return ModelParallel(
        layout=layout,
        rank=rank,
        tp=_group("tp", layout.tp_groups(), rank, connect),
        pp=_group("pp", layout.pp_groups(), rank, connect),
        dp=_group("dp", layout.dp_groups(), rank, connect),
        ep=_group("ep", layout.ep_groups(), rank, connect),
        log=log,
    )


def connect_experts(layout: ParallelLayout, rank: int, connect: Connect) -> GroupCoordinator:
    """The group of global ``rank`` over which experts are spread, of all replicas; all ranks must call this."""
    return _group("ep", layout.ep_groups(), rank, connect)


def _group(name: GroupName, groups: list[list[int]], rank: int, connect: Connect) -> GroupCoordinator:
    ranks = next(tuple(group) for group in groups if rank in group)
    position = ranks.index(rank)
    if len(ranks) == 1:
        return GroupCoordinator(name=name, ranks=ranks, rank=position)
    links = connect(name, ranks, position)
    return GroupCoordinator(
        name=name,
        ranks=ranks,
        rank=position,
        communicator=links.communicator,
        host=links.host,
        link=links.name,
        hosts=links.hosts,
    )
