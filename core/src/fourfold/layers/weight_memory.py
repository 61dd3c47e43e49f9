"""Memory of weights that can be given back for a while, for engines that sleep. Knows no layer."""

from __future__ import annotations

import torch


class WeightMemory:
    """See ``fourfold.contracts.linear_method.ReleasableWeights``; speaks of all tensors that it has made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}
        """Number of a weight -> its content in the host's memory, while the device has it not."""

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return sum(weight.untyped_storage().nbytes() for weight in self._weights)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight, not filled yet."""
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        self._weights.append(weight)
        return weight

    def release_weights(self, *, keep: bool) -> None:
        """Shrink every weight's storage to nothing."""
        if not keep:
            self._kept.clear()
        elif self._device.type == "cpu":
            return
        for number, weight in enumerate(self._weights):
            storage = weight.untyped_storage()
            if storage.nbytes():
                if keep:
                    self._kept[number] = weight.cpu()
                storage.resize_(0)

    def restore_weights(self) -> None:
        """Take storages of the old sizes, which may lie elsewhere now, and fill them with what was kept."""
        for number, weight in enumerate(self._weights):
            storage = weight.untyped_storage()
            if not storage.nbytes():
                storage.resize_(weight.nbytes)
            if number in self._kept:
                weight.copy_(self._kept.pop(number))

    def discard_weights(self) -> None:
        """Nothing: what comes is written over what is there."""
