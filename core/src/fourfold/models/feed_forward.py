"""The dense feed-forward of a layer: two linears with a gated activation between. Knows no rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import ParallelLayer
    from fourfold.models.description import Activation


class DenseFeedForward:
    """[T, H] -> [T, H]."""

    def __init__(
        self,
        gate_up: ParallelLayer,
        down: Callable[[torch.Tensor], torch.Tensor],
        operators: Operators,
        activation: Activation,
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gated = operators.gated
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``down(act(gate(x)) * up(x))``."""
        return self._down(self._gated(self._gate_up(x), self._activation))
