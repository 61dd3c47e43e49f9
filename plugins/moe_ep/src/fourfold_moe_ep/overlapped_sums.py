"""Core's layers that end with a sum over the ranks, but for the sum: a microbatch computes while another's travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.layers.linear import RowParallelLinear
from fourfold.layers.mixture import MixtureParallelLayer
from fourfold_moe_ep.overlap import overlap_of

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class OverlappedRow:
    """See ``fourfold.layers.linear.RowParallelLinear``. Its sum is its own: no norm can take it over."""

    def __init__(self, context: ParallelLayerContext) -> None:
        self._row = RowParallelLinear(context)
        self._communicator = context.communicator
        self._overlap = overlap_of(context)
        self._overlap.expect_sums(context.communicator)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's columns."""
        self._row.load(parameter, tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's inputs] -> [T, out], whole on every rank."""
        return self._overlap.all_reduce(self._communicator, self._row.part(x))


class OverlappedMixture(MixtureParallelLayer):
    """See MixtureParallelLayer."""

    def __init__(self, context: ParallelLayerContext) -> None:
        super().__init__(context)
        self._group = context.communicator
        self._overlap = overlap_of(context)
        self._overlap.expect_sums(context.communicator)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self._overlap.all_reduce(self._group, self.part(x))
