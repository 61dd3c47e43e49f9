"""What installed plugins offer of one kind, with where each entry comes from. Knows no plugin manager."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold.entries import (
    AllToAllEntry,
    AttentionBackendEntry,
    CheckpointFormatEntry,
    CheckpointSourceEntry,
    CommunicatorEntry,
    Entry,
    ExecutorEntry,
    ExpertPlacementEntry,
    ExpertsEntry,
    LinearMethodEntry,
    LoadBalancerEntry,
    ModelEntry,
    OperatorsEntry,
    ParallelLayerEntry,
    ReasoningParserEntry,
    RebalancerEntry,
    RoutesEntry,
    SchedulerEntry,
    TokenizerEntry,
    ToolParserEntry,
)

Key = TypeVar("Key", bound=Hashable)
E = TypeVar("E", bound=Entry[Any])


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Origin:
    """Where a plugin comes from; one row of the manifest that ranks compare."""

    plugin: str
    """The entry point's name."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({self.package})"

    @property
    def package(self) -> str:
        """The distribution and its version, as in ``fourfold-core 0.1.0``."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferKind:
    """One kind of offer, as users and messages call it."""

    noun: str
    """As in "no load balancer called 'x'"."""
    entry: type[Entry[Any]]
    option: str = ""
    """The option that picks one by name; empty where nothing is picked."""


OFFER_KINDS: Final[Mapping[str, OfferKind]] = {
    "executors": OfferKind(noun="executor", entry=ExecutorEntry, option="--executor"),
    "communicators": OfferKind(noun="communicator", entry=CommunicatorEntry, option="--comm"),
    "parallel_layers": OfferKind(noun="parallel layer", entry=ParallelLayerEntry, option="--parallel-layer"),
    "load_balancers": OfferKind(noun="load balancer", entry=LoadBalancerEntry, option="--load-balancer"),
    "schedulers": OfferKind(noun="scheduler", entry=SchedulerEntry, option="--scheduler"),
    "linear_methods": OfferKind(noun="linear method", entry=LinearMethodEntry, option="--linear-method"),
    "attention_backends": OfferKind(noun="attention backend", entry=AttentionBackendEntry, option="--attention"),
    "operators": OfferKind(noun="operators", entry=OperatorsEntry, option="--operators"),
    "models": OfferKind(noun="model", entry=ModelEntry),
    "checkpoint_formats": OfferKind(noun="checkpoint format", entry=CheckpointFormatEntry, option="--load-format"),
    "checkpoint_sources": OfferKind(noun="checkpoint source", entry=CheckpointSourceEntry),
    "tokenizers": OfferKind(noun="tokenizer", entry=TokenizerEntry, option="--tokenizer"),
    "tool_parsers": OfferKind(noun="tool parser", entry=ToolParserEntry),
    "reasoning_parsers": OfferKind(noun="reasoning parser", entry=ReasoningParserEntry),
    "routes": OfferKind(noun="routes", entry=RoutesEntry),
    "all_to_alls": OfferKind(noun="all-to-all", entry=AllToAllEntry, option="--all-to-all"),
    "experts": OfferKind(noun="experts", entry=ExpertsEntry, option="--experts"),
    "expert_placements": OfferKind(noun="expert placement", entry=ExpertPlacementEntry, option="--expert-placement"),
    "rebalancers": OfferKind(noun="rebalancer", entry=RebalancerEntry, option="--rebalancer"),
}
"""Hook name without its prefix -> what it offers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """One entry, of one kind, from one plugin."""

    kind: str
    """A key of ``OFFER_KINDS``."""
    entry: Entry[Any]
    origin: Origin

    @property
    def key(self) -> Any:
        """What is unique within the kind: the name, for parallel layers (kind of layer, name)."""
        if isinstance(self.entry, ParallelLayerEntry):
            return self.entry.kind, self.entry.name
        return self.entry.name


def clashes(offered: Iterable[Offered]) -> tuple[str, ...]:
    """One line for each entry whose name another plugin has offered before."""
    first: dict[tuple[str, Any], Offered] = {}
    lines = []
    for one in offered:
        other = first.setdefault((one.kind, one.key), one)
        if other is not one:
            noun = OFFER_KINDS[one.kind].noun
            lines.append(
                f"two plugins offer {noun} {one.entry.name!r}: {other.origin} and {one.origin}; uninstall one of them"
            )
    return tuple(lines)


class Offers(dict[Key, E]):
    """The entries of one kind by name, sorted; knows their origins, and the plugins that could not be asked."""

    def __init__(self, entries: Mapping[Key, E], origins: Mapping[Key, Origin], broken: tuple[str, ...] = ()) -> None:
        super().__init__(entries)
        self.origins = dict(origins)
        self.broken = broken
        """Why plugins failed to load; any of them may have offered more names."""
