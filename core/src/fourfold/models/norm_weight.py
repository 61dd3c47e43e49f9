"""The weight of one norm: whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fourfold.contracts.parallel_layer import TensorSlices


class NormWeight:
    """[size] in the dtype of the activations; the parameter is ``weight``."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=dtype, device=device)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Copy the whole tensor; ``parameter`` is ``weight``, the only one."""
        self.tensor.copy_(tensor[:])
