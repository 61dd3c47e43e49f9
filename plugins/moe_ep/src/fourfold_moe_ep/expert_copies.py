"""Which copy of an expert a token goes to. E logical experts, P physical ones, C the most copies of any, L layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fourfold.contracts.mixture import ExpertMap
from fourfold.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def first_map(num_layers: int, num_experts: int, num_physical: int) -> ExpertMap:
    """One copy of each expert in order, then a second one of as many as there is room for, and so on."""
    row = np.arange(num_physical, dtype=np.int32) % num_experts
    return map_of(np.tile(row, (num_layers, 1)), num_experts)


def map_of(physical_to_logical: NDArray[np.int32], num_experts: int) -> ExpertMap:
    """``physical_to_logical`` [L, P] and its inverse; raises EngineError for an expert without a copy."""
    num_layers = len(physical_to_logical)
    counts = np.zeros((num_layers, num_experts), np.int32)
    layers = np.arange(num_layers)[:, None]
    np.add.at(counts, (layers, physical_to_logical), 1)
    if counts.min(initial=1) < 1:
        layer, expert = np.argwhere(counts < 1)[0]
        raise EngineError(f"expert {expert} has no copy in layer {layer} of the expert map")
    copies = np.full((num_layers, num_experts, int(counts.max(initial=1))), -1, np.int32)
    # Copies of an expert are neighbours once sorted, in the order of their places.
    order = np.argsort(physical_to_logical, axis=1, kind="stable").astype(np.int32)
    logical = np.take_along_axis(physical_to_logical, order, 1)
    first = (np.cumsum(counts, axis=1) - counts)[layers, logical]
    copies[layers, logical, np.arange(order.shape[1]) - first] = order
    return ExpertMap(physical_to_logical=physical_to_logical, logical_to_physical=copies, counts=counts)


class CopyTable:
    """One layer's map on its device; may change between two steps."""

    def __init__(self, expert_map: ExpertMap, layer: int, device: torch.device) -> None:
        self._device = device
        self.set(expert_map, layer)

    def set(self, expert_map: ExpertMap, layer: int) -> None:
        """Take row ``layer`` of a map."""
        self._copies = torch.from_numpy(expert_map.logical_to_physical[layer].copy()).to(self._device)
        counts = expert_map.counts[layer]
        self._counts = torch.from_numpy(counts.copy()).to(self._device) if counts.max() > 1 else None

    def choose(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 [T, K] logical experts -> int32 [T, K] physical ones; the copies of an expert take turns by row."""
        if self._counts is None:
            return self._copies[ids, 0]
        rows = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None]
        return self._copies[ids, rows % self._counts[ids]]
