"""What this distribution offers. A table of contents: torch is loaded when something is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import AllToAllEntry, ExpertPlacementEntry
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.contracts.mixture import AllToAll, ExpertPlacement
    from fourfold.entries import AllToAllContext

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_all_to_alls() -> list[AllToAllEntry]:
    """Offer ``allgather_reducescatter``, ``all_to_all_single`` and ``shm``."""
    return [
        AllToAllEntry(
            name="allgather_reducescatter",
            build=_build_gathered,
            summary="every token to every rank; works over any communicator",
        ),
        AllToAllEntry(
            name="all_to_all_single",
            build=_build_exchanged,
            summary="a token once to each rank that has one of its experts; works over any communicator",
        ),
        AllToAllEntry(
            name="shm",
            build=_build_slots,
            summary="a token written straight into the memory of the ranks that have its experts",
            capabilities=frozenset({"peer_memory"}),
        ),
    ]


@hookimpl
def fourfold_expert_placements() -> list[ExpertPlacementEntry]:
    """Offer ``linear`` and ``round-robin``."""
    return [
        ExpertPlacementEntry(name="linear", build=_build_linear, summary="neighbouring experts on one rank"),
        ExpertPlacementEntry(name="round-robin", build=_build_round_robin, summary="expert e on rank e mod R"),
    ]


def _build_gathered(context: AllToAllContext) -> AllToAll:
    from fourfold_moe_ep.gathered import AllGatherReduceScatter

    return AllGatherReduceScatter(context)


def _build_exchanged(context: AllToAllContext) -> AllToAll:
    from fourfold_moe_ep.exchanged import AllToAllSingle

    return AllToAllSingle(context)


def _build_slots(context: AllToAllContext) -> AllToAll:
    from fourfold_moe_ep.peer_slots import PeerSlots

    return PeerSlots(context)


def _build_linear(context: None) -> ExpertPlacement:
    from fourfold_moe_ep.placement import Linear

    return Linear()


def _build_round_robin(context: None) -> ExpertPlacement:
    from fourfold_moe_ep.placement import RoundRobin

    return RoundRobin()
