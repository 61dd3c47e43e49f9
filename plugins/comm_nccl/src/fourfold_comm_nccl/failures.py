"""Whom kernels of this rank have waited for in vain: written by the device, read by the host without a call."""

from __future__ import annotations

import ctypes

import torch


class Failures:
    """One for all kernels of a communicator: where one has waited in vain, later ones do not wait at all."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self._errors = torch.zeros(1 + world_size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._failed = ctypes.c_int32.from_address(self.address)

    @property
    def address(self) -> int:
        """For kernels: 32 bits that say whether any has failed, and for each rank whether it was missed."""
        return self._errors.data_ptr()

    @property
    def failed(self) -> bool:
        """Whether a kernel has waited in vain; what it gave is not to be used."""
        return self._failed.value != 0

    @property
    def missing(self) -> list[int]:
        """The ranks of the group that were waited for in vain."""
        return [rank for rank in range(self._world_size) if int(self._errors[1 + rank])]
