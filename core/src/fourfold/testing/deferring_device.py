"""A CPU that behaves as an accelerator: inputs are copied when they are uploaded, and results are withheld until asked.

The twin of asynchronous devices where there is none. It computes at once, so what it finds is wrong use of memory and
values, not of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fourfold.worker.cpu_device import CpuDevice

_HOSTS: Final = 3
_POISON: Final = 0xAB


class DeferringDevice(CpuDevice):
    """See ``fourfold.worker.device.Device``."""

    asynchronous = True

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype=dtype)
        self.waits = 0
        """How often somebody waited for a value."""

    def staging(self, nbytes: int, *, kept: int = 0) -> CopyingStaging:
        """Host buffers that are not the device's."""
        return CopyingStaging(nbytes, kept)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy."""
        return torch.from_numpy(np.array(array))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> WithheldFetch:
        """Copies of what ``tensors`` are now."""
        return WithheldFetch(self, tensors)


class CopyingStaging:
    """Host buffers in turn, full of nonsense whenever they are claimed."""

    def __init__(self, nbytes: int, kept: int) -> None:
        self.device = torch.zeros(kept + nbytes, dtype=torch.uint8)
        self.hosts: list[npt.NDArray[np.uint8]] = [
            torch.zeros(nbytes, dtype=torch.uint8).numpy() for _ in range(_HOSTS)
        ]
        self._kept = kept
        self._last = 0

    def claim(self) -> int:
        """The next one, as nobody left it."""
        self._last = (self._last + 1) % _HOSTS
        self.hosts[self._last][:] = _POISON
        return self._last

    def upload(self, place: int, nbytes: int) -> None:
        """Copy."""
        self.device[self._kept : self._kept + nbytes] = torch.from_numpy(self.hosts[place][:nbytes])


class WithheldFetch:
    """Values that come when they are waited for."""

    def __init__(self, device: DeferringDevice, tensors: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._values = [tensor.detach().clone() for tensor in tensors]

    def wait(self) -> list[npt.NDArray[Any]]:
        """See ``fourfold.worker.device.Fetch``."""
        self._device.waits += 1
        return [value.numpy() for value in self._values]
