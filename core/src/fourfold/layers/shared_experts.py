"""The feed-forward that every token goes through beside its experts, cut over the ranks like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fourfold.errors import ConfigError
from fourfold.layers.linear import MergedColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext
    from fourfold.models.description import MixtureDescription


class SharedExperts:
    """[T, H] -> this rank's part of the sum [T, H]; the caller adds up the ranks.

    Parameters are ``shared.gate.weight``, ``shared.up.weight``, ``shared.down.weight`` and, where the whole is gated,
    ``shared_gate.weight``.
    """

    def __init__(self, context: ParallelLayerContext, mixture: MixtureDescription) -> None:
        if context.operators is None:
            raise ConfigError("a moe layer needs operators in its context")
        hidden, inner = context.in_features, mixture.shared_intermediate_size
        self._gate_up = MergedColumnParallelLinear(replace(context, out_sizes=(inner, inner), bias=False))
        self._down = RowParallelLinear(
            replace(context, in_features=inner, out_sizes=(hidden,), bias=False, communicator=None)
        )
        self._gated = context.operators.gated
        self._activation = context.activation
        self._gate: torch.Tensor | None = None
        if mixture.shared_gate:
            self._gate = torch.empty(1, hidden, dtype=context.dtype, device=context.device)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's part."""
        _, _, part = parameter.partition(".")
        if parameter == "shared_gate.weight" and self._gate is not None:
            self._gate.copy_(tensor[:])
        elif part == "down.weight":
            self._down.load("weight", tensor)
        else:
            self._gate_up.load({"gate.weight": "0.weight", "up.weight": "1.weight"}[part], tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], summed over the ranks by the caller."""
        out = self._down(self._gated(self._gate_up(x), self._activation))
        return out if self._gate is None else out * torch.sigmoid(functional.linear(x, self._gate))
