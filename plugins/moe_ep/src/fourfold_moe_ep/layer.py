"""The moe layer ``ep``: whole experts, spread over ranks. T tokens, H hidden size, K experts a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from fourfold.errors import ConfigError
from fourfold.layers.mixture import build_experts
from fourfold.layers.router import RouterGate
from fourfold.layers.shared_experts import SharedExperts
from fourfold_moe_ep.spread import spread_of

if TYPE_CHECKING:
    from fourfold.contracts.mixture import AllToAll, ExpertPart
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class ExpertParallelLayer:
    """[T, H] -> [T, H], whole on every rank. See ``fourfold.contracts.parallel_layer.MixtureLayer``."""

    def __init__(self, context: ParallelLayerContext) -> None:
        mixture = context.mixture
        if mixture is None:
            raise ConfigError("a moe layer needs the description of its mixture")
        self._spread = spread_of(context, mixture)
        self._router = RouterGate(context, mixture)
        chosen, self._experts = build_experts(
            context, num_experts=len(self._spread.local), intermediate_size=mixture.intermediate_size
        )
        self._held = self._spread.hold(self._experts, mixture, context)
        self._shared = SharedExperts(context, mixture) if mixture.shared_intermediate_size else None
        self._communicator = context.communicator
        self._spread.join(self)
        self.backends = {
            "experts": chosen,
            "expert_placement": self._spread.placement,
            "all_to_all": self._spread.all_to_all,
        }

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take the tensor, or nothing of it where it belongs to an expert of other ranks."""
        kind, _, rest = parameter.partition(".")
        if kind == "router":
            self._router.load(rest, tensor)
        elif kind == "experts":
            expert, part, _ = rest.split(".")
            for slot in self._held.slots_of(int(expert)):
                self._experts.load(slot, cast("ExpertPart", part), tensor[:])
        elif self._shared is not None:
            self._shared.load(parameter, tensor)
        else:
            raise ConfigError(f"this moe layer has no parameter {parameter}")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        wire = self._spread.present_wire
        return self._sum(x) if wire is None else self._travel(x, wire)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks have all tokens: each adds what its own experts make of them."""
        ids, weights = self._router(x)
        out = self._compute(x, self._held.choose(ids), weights)
        if self._shared is not None:
            out = out + self._shared(x)
        return self._spread.overlap.all_reduce(self._communicator, out)

    def _travel(self, x: torch.Tensor, wire: AllToAll) -> torch.Tensor:
        """Each rank sends off its share of the tokens that it has in common with its tensor-parallel peers."""
        spread, overlap = self._spread, self._spread.overlap
        own, sizes, channel = spread.own_tokens(len(x)), spread.sizes(len(x)), overlap.channel
        mine = x[own]
        ids, weights = self._router(mine)
        wire.dispatch_send(mine, self._held.choose(ids), weights, sizes=sizes, channel=channel)
        shared = None if self._shared is None or not len(x) else self._shared(x)
        overlap.hand_over()
        arrived = wire.dispatch_receive(channel=channel)
        wire.combine_send(self._compute(*arrived), channel=channel)
        overlap.hand_over()
        out = wire.combine_receive(channel=channel)
        if not len(x):  # others needed experts of this rank
            return x
        communicator = self._communicator
        if shared is not None:
            shared[own] += out
            return overlap.all_reduce(communicator, shared)
        if communicator is None:
            return out
        return communicator.all_gather(out, sizes=spread.tensor_sizes(len(x)), channel=overlap.line(communicator))

    def _compute(self, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of rows [R, H], by physical experts int32 [R, K] or -1."""
        if not self._spread.local:
            return torch.zeros_like(x)
        return self._experts(x, self._spread.slots(physical), weights)
