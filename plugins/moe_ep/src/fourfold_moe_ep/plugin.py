"""What this distribution offers. A table of contents: torch is loaded when something is built."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from fourfold.entries import AllToAllEntry, ExpertPlacementEntry, ParallelLayerEntry, RebalancerEntry, Suitability
from fourfold.errors import ConfigError
from fourfold.markers import hookimpl
from fourfold.selection import AUTO, LAYER_KINDS, names_by_key
from fourfold_moe_ep.settings import ExpertParallelSettings, settings_of

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.mixture import AllToAll, ExpertPlacement, Rebalancer, RebalancerContext
    from fourfold.contracts.parallel_layer import MixtureLayer, ParallelLayer
    from fourfold.entries import AllToAllContext, ParallelLayerContext

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_parallel_layers() -> list[ParallelLayerEntry]:
    """Offer ``ep`` for moe layers, and ``overlapped`` for those that end with a sum."""
    return [
        ParallelLayerEntry(
            name="ep",
            kind="moe",
            build=_build_layer,
            summary="whole experts, spread over the ranks",
            capabilities=frozenset({"expert_parallel", "microbatches"}),
            suits=_suits_layer,
        ),
        ParallelLayerEntry(
            name="overlapped",
            kind="row",
            build=_build_row,
            summary="as core's; one microbatch computes while the other's sum travels",
            capabilities=frozenset({"microbatches"}),
            suits=_suits_overlap,
        ),
        ParallelLayerEntry(
            name="overlapped",
            kind="moe",
            build=_build_mixture,
            summary="as core's; one microbatch computes while the other's sum travels",
            capabilities=frozenset({"microbatches"}),
            suits=_suits_overlap,
        ),
    ]


@hookimpl
def fourfold_settings() -> type[ExpertParallelSettings]:
    """Give ``--moe-ep-...``."""
    return ExpertParallelSettings


@hookimpl
def fourfold_check_config(config: EngineConfig) -> None:
    """Refuse what would have no effect."""
    settings = settings_of(config)
    for field in fields(settings):
        option, value = f"--moe-ep-{field.name.replace('_', '-')}", getattr(settings, field.name)
        if value != field.default and not config.parallel.enable_expert_parallel:
            raise ConfigError(
                f"{option} is {value}, for experts that are spread over ranks; add --enable-expert-parallel, or leave "
                "it out"
            )
    asked = {
        "--rebalancer": (config.backends.rebalancer, AUTO),
        "--moe-ep-rebalance-gain": (settings.rebalance_gain, ExpertParallelSettings().rebalance_gain),
    }
    layer = names_by_key("--parallel-layer", config.backends.parallel_layer, LAYER_KINDS)["moe"]
    for option, (given, default) in asked.items():
        if given != default and not settings.rebalance_interval and layer in ("ep", AUTO):
            raise ConfigError(
                f"{option} is {given}, and experts stay where they are; set --moe-ep-rebalance-interval too"
            )


@hookimpl
def fourfold_all_to_alls() -> list[AllToAllEntry]:
    """Offer ``allgather_reducescatter``, ``all_to_all_single`` and ``shm``."""
    return [
        AllToAllEntry(
            name="allgather_reducescatter",
            build=_build_gathered,
            summary="every token to every rank; works over any communicator",
            suits=lambda config: Suitability(score=20, reason="no rank waits to hear how many tokens will come"),
        ),
        AllToAllEntry(
            name="all_to_all_single",
            build=_build_exchanged,
            summary="a token once to each rank that has one of its experts; works over any communicator",
            suits=lambda config: Suitability(score=10, reason="the fewest bytes"),
        ),
        AllToAllEntry(
            name="shm",
            build=_build_slots,
            summary="a token written straight into the memory of the ranks that have its experts",
            capabilities=frozenset({"peer_memory"}),
            suits=lambda config: Suitability(score=50, reason="ranks of one host share its memory"),
        ),
    ]


@hookimpl
def fourfold_expert_placements() -> list[ExpertPlacementEntry]:
    """Offer ``linear`` and ``round-robin``."""
    return [
        ExpertPlacementEntry(
            name="linear",
            build=_build_linear,
            summary="neighbouring experts on one rank",
            suits=lambda config: Suitability(score=10, reason="the order of the checkpoint"),
        ),
        ExpertPlacementEntry(name="round-robin", build=_build_round_robin, summary="expert e on rank e mod R"),
    ]


@hookimpl
def fourfold_rebalancers() -> list[RebalancerEntry]:
    """Offer ``greedy``."""
    return [
        RebalancerEntry(
            name="greedy",
            build=_build_greedy,
            summary="copies of the hottest, heaviest first; groups of experts stay on one host each where they fit",
            suits=lambda config: Suitability(score=10, reason="balances any load"),
        )
    ]


def _suits_layer(config: EngineConfig) -> Suitability:
    if config.parallel.enable_expert_parallel:
        return Suitability(score=100, reason="--enable-expert-parallel asks for it")
    return Suitability(score=1, reason="spreads whole experts; --enable-expert-parallel prefers it")


def _suits_overlap(config: EngineConfig) -> Suitability:
    if config.parallel.enable_dbo and config.parallel.tensor_parallel_size > 1:
        return Suitability(score=50, reason="--enable-dbo asks for it")
    return Suitability(score=1, reason="overlaps sums; --enable-dbo prefers it")


def _build_layer(context: ParallelLayerContext) -> MixtureLayer:
    from fourfold_moe_ep.layer import ExpertParallelLayer

    return ExpertParallelLayer(context)


def _build_row(context: ParallelLayerContext) -> ParallelLayer:
    from fourfold_moe_ep.overlapped_sums import OverlappedRow

    return OverlappedRow(context)


def _build_mixture(context: ParallelLayerContext) -> MixtureLayer:
    from fourfold_moe_ep.overlapped_sums import OverlappedMixture

    return OverlappedMixture(context)


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


def _build_greedy(context: RebalancerContext) -> Rebalancer:
    from fourfold_moe_ep.rebalancer import GreedyRebalancer

    return GreedyRebalancer(context)
