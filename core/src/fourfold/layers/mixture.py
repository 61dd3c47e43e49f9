"""A layer of experts, each cut over the ranks like a dense feed-forward: every rank holds a part of every expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fourfold.entries import ExpertsContext
from fourfold.errors import ConfigError
from fourfold.layers.backends import build_backend
from fourfold.layers.partition import cut_features
from fourfold.layers.router import RouterGate
from fourfold.layers.shared_experts import SharedExperts

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.mixture import ExpertPart, Experts
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class MixtureParallelLayer:
    """[T, H] -> [T, H], whole on every rank: one sum over the ranks, as for a dense feed-forward.

    Parameters are those of ``fourfold.contracts.parallel_layer.MixtureLayer``.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        mixture = context.mixture
        if mixture is None:
            raise ConfigError("a moe layer needs the description of its mixture")
        self._router = RouterGate(context, mixture)
        self._features = cut_features(mixture.intermediate_size, context.rank, context.world_size)
        chosen, self._experts = build_experts(
            context, num_experts=mixture.num_experts, intermediate_size=len(self._features)
        )
        self.backends = {"experts": chosen}
        """See ``MixtureLayer``."""
        self._shared = SharedExperts(context, mixture) if mixture.shared_intermediate_size else None
        self._communicator = context.communicator

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's part of one tensor."""
        kind, _, rest = parameter.partition(".")
        if kind == "router":
            self._router.load(rest, tensor)
        elif kind == "experts":
            expert, part, _ = rest.split(".")
            mine = slice(self._features.start, self._features.stop)
            cut = tensor[:, mine] if part == "down" else tensor[mine]
            self._experts.load(int(expert), cast("ExpertPart", part), cut)
        elif self._shared is not None:
            self._shared.load(parameter, tensor)
        else:
            raise ConfigError(f"this moe layer has no parameter {parameter}")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        out = self.part(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """See ``fourfold.contracts.parallel_layer.SummedLayer``."""
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out + self._shared(x)


def build_experts(context: ParallelLayerContext, *, num_experts: int, intermediate_size: int) -> tuple[str, Experts]:
    """The name and the experts that ``--experts`` chooses, with so many local slots of this local size."""
    if context.registry is None or context.operators is None:
        raise ConfigError("a moe layer needs the registry and operators in its context")
    experts_context = ExpertsContext(
        config=context.config,
        device=context.device,
        dtype=context.dtype,
        num_experts=num_experts,
        hidden_size=context.in_features,
        intermediate_size=intermediate_size,
        activation=context.activation,
        operators=context.operators,
        memory=context.weight_memory,
    )
    entries, wanted = context.registry.experts(), context.config.backends.experts
    return build_backend("experts", entries, wanted, context.config, lambda entry: entry.build(experts_context))
