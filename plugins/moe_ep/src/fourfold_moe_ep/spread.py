"""What the expert layers of one decoder have in common: who holds which expert, and the wire between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from fourfold.contracts.mixture import RebalancerContext
from fourfold.distributed.ballot import Ballot
from fourfold.entries import AllToAllContext
from fourfold.errors import ConfigError
from fourfold.layers.backends import build_backend
from fourfold.layers.partition import cut_evenly
from fourfold.models.microbatches import cut_tokens
from fourfold.selection import AUTO, select
from fourfold_moe_ep.expert_copies import first_map
from fourfold_moe_ep.held_experts import HeldExperts
from fourfold_moe_ep.overlap import overlap_of
from fourfold_moe_ep.planner import PLAN_SECONDS
from fourfold_moe_ep.rebalancing import Rebalancing
from fourfold_moe_ep.settings import settings_of
from fourfold_moe_ep.streamed_wire import StreamedWire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.mixture import AllToAll, Experts
    from fourfold.contracts.step_part import StepVote, TakeTurns
    from fourfold.entries import ParallelLayerContext
    from fourfold.models.description import MixtureDescription
    from fourfold.plugins import PluginRegistry

_KEY: Final = "expert spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The ranks that the experts are spread over."""

    rank: int
    world_size: int
    communicator: Communicator | None
    host: Communicator | None
    """Moves what is on the CPU."""
    hosts: tuple[int, ...] = ()
    """A number for each rank, the same for ranks of one host; empty where it is not known."""


class ExpertSpread:
    """One for all layers of a decoder on one rank. Physical expert p is on the same rank in every layer."""

    def __init__(self, context: ParallelLayerContext, mixture: MixtureDescription, registry: PluginRegistry) -> None:
        group = _group_of(context)
        self.rank = group.rank
        self.world_size = group.world_size
        self._tensor_rank, self._tensor_ranks = context.rank, context.world_size
        self.num_physical = mixture.num_experts + settings_of(context.config).redundant_experts
        backends = context.config.backends
        placement = select("expert placement", registry.expert_placements(), backends.expert_placement, context.config)
        self.placement = placement.entry.name
        self.owners = tuple(placement.entry.build(None).place(self.num_physical, self.world_size))
        if len(self.owners) != self.num_physical or not set(self.owners) <= set(range(self.world_size)):
            raise ConfigError(
                f"expert placement {self.placement!r} puts experts on ranks {list(self.owners)}; it is to give a rank "
                f"from 0 to {self.world_size - 1} for each of {self.num_physical}"
            )
        self.local = [expert for expert, owner in enumerate(self.owners) if owner == self.rank]
        """Physical experts of this rank, by slot."""
        slots = torch.full((self.num_physical + 1,), -1, dtype=torch.int32)
        slots[self.local] = torch.arange(len(self.local), dtype=torch.int32)
        self._slots = slots.to(context.device)
        self.all_to_all, self.wire = self._connect(context, mixture, registry, group)
        self._ballot: Ballot | None = None
        if group.host is not None and self.world_size > self._tensor_ranks:
            self._ballot = Ballot(group.host, self._tensor_ranks)
        self.overlap = overlap_of(context)
        self._streamed: AllToAll | None = None
        if self.wire is not None:
            self.overlap.expect()
            if context.config.parallel.enable_dbo and context.device.type == "cuda":
                self._streamed = StreamedWire(self.wire, context.device)
        else:
            self.overlap.expect_sums(context.communicator)
        self._tokens: list[int] | None = None
        """Of each engine in the present step, where several make it together."""
        self._layers: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self._no_tokens = torch.empty(0, context.in_features, dtype=context.dtype, device=context.device)
        self._settings = settings_of(context.config)
        self._held: list[HeldExperts] = []
        self._numbers: list[int] = []
        """Of these layers, in the whole model."""
        self._rebalancing: Rebalancing | None = None
        if self._settings.rebalance_interval:
            timeouts = context.config.timeouts
            chosen = select("rebalancer", registry.rebalancers(), backends.rebalancer, context.config)
            self._rebalancing = Rebalancing(
                self._held,
                chosen.entry.build(RebalancerContext(num_groups=mixture.num_groups, hosts=group.hosts)),
                group.communicator,
                self.owners,
                interval=self._settings.rebalance_interval,
                least_gain=self._settings.rebalance_gain,
                repeats=self.world_size if self.wire is None else 1,
                # A rank that waits for longer than that takes the others for dead.
                plan_seconds=min(PLAN_SECONDS, timeouts.rpc_timeout / 2, timeouts.stall_timeout / 2),
            )

    def hold(self, experts: Experts, mixture: MixtureDescription, context: ParallelLayerContext) -> HeldExperts:
        """Add the next layer's."""
        held = HeldExperts(
            experts,
            first_map(1, mixture.num_experts, self.num_physical),
            self.local,
            sizes=(context.in_features, mixture.intermediate_size),
            dtype=context.dtype,
            device=context.device,
            counts_load=self._rebalancing is not None,
        )
        self._held.append(held)
        self._numbers.append(context.layer)
        return held

    def join(self, layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the next layer, for steps in which this rank only serves others."""
        self._layers.append(layer)

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        """See ``fourfold.contracts.step_part.StepPart``."""
        if self._ballot is None:
            return vote
        outcome = self._ballot.hold(num_tokens, vote, wants_cut=self.overlap.cut)  # which has begun this step before
        self._tokens, self.overlap.cut = outcome.tokens, outcome.cut
        if not num_tokens and any(outcome.tokens):
            for layer in self._layers:
                layer(self._no_tokens)
        return outcome.vote

    def begin_recording(self, num_tokens: int) -> None:
        """See StepPart."""

    def take_turns(self, num_tokens: int) -> TakeTurns | None:
        """See StepPart; turns are the overlap's."""
        return None

    @property
    def present_wire(self) -> AllToAll | None:
        """What carries the tokens of the present batch, a microbatch's beside what the other one computes."""
        return self.wire if self.overlap.half is None or self._streamed is None else self._streamed

    def end_step(self) -> None:
        """See StepPart."""
        if self._rebalancing is not None:
            self._rebalancing.end_step()

    def counters(self) -> Mapping[str, float]:
        """See StepPart."""
        return {} if self._rebalancing is None else self._rebalancing.counters

    def report(self) -> Mapping[str, Any]:
        """See StepPart: how much each expert and rank was asked for, where that is counted."""
        found = None if self._rebalancing is None else self._rebalancing.report()
        return {} if found is None else {"experts": {"layers": self._numbers, **found}}

    def close(self) -> None:
        """See StepPart."""
        if self.wire is not None:
            self.wire.close()

    def slots(self, physical: torch.Tensor) -> torch.Tensor:
        """Physical experts, or -1 -> slots of this rank, or -1 where it has none; int32, of one shape."""
        return self._slots[physical]

    def own_tokens(self, num_tokens: int) -> slice:
        """Of the tokens that all tensor-parallel ranks have, those that this one sends off."""
        own = cut_evenly(num_tokens, self._tensor_rank, self._tensor_ranks)
        return slice(own.start, own.stop)

    def tensor_sizes(self, num_tokens: int) -> list[int]:
        """Of these tokens, how many each tensor-parallel rank sends off."""
        return [len(cut_evenly(num_tokens, rank, self._tensor_ranks)) for rank in range(self._tensor_ranks)]

    def sizes(self, num_tokens: int) -> list[int]:
        """Tokens that each rank of the group sends off, of which this rank's engine has ``num_tokens``."""
        if self._tokens is None:
            return self.tensor_sizes(num_tokens)
        tokens, half = self._tokens, self.overlap.half
        if half is not None:
            tokens = [cut_tokens(count)[half] for count in tokens]
        return [size for count in tokens for size in self.tensor_sizes(count)]

    def _connect(
        self, context: ParallelLayerContext, mixture: MixtureDescription, registry: PluginRegistry, group: _Group
    ) -> tuple[str, AllToAll | None]:
        """The name and the all-to-all; None where ranks that have the same tokens add up what their experts say."""
        wanted = context.config.backends.all_to_all
        if group.communicator is None or (wanted == AUTO and self.world_size == self._tensor_ranks):
            return "none", None
        all_to_all_context = AllToAllContext(
            config=context.config,
            device=context.device,
            dtype=context.dtype,
            communicator=group.communicator,
            hidden_size=context.in_features,
            top_k=mixture.top_k,
            num_experts=self.num_physical,
            owners=torch.tensor(self.owners, dtype=torch.int32),
            max_tokens=math.ceil(context.config.scheduler.max_num_batched_tokens / self._tensor_ranks),
        )
        return build_backend(
            "all-to-all", registry.all_to_alls(), wanted, context.config, lambda entry: entry.build(all_to_all_context)
        )


def spread_of(context: ParallelLayerContext, mixture: MixtureDescription) -> ExpertSpread:
    """The one of this decoder, made by its first layer."""
    if context.registry is None:
        raise ConfigError("a moe layer needs the registry in its context")
    found = context.shared.get(_KEY)
    if not isinstance(found, ExpertSpread):
        found = context.shared[_KEY] = ExpertSpread(context, mixture, context.registry)
    return found


def _group_of(context: ParallelLayerContext) -> _Group:
    group = context.expert_group
    if group is None:
        return _Group(rank=context.rank, world_size=context.world_size, communicator=context.communicator, host=None)
    return _Group(
        rank=group.rank,
        world_size=group.world_size,
        communicator=group.communicator,
        host=group.host or group.communicator,
        hosts=group.hosts,
    )
