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

from fourfold.worker.cpu_device import Arrived, CpuDevice, SharedStaging

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


class CopyingStaging(SharedStaging):
    """Host buffers in turn, full of nonsense whenever they are claimed."""

    def __init__(self, nbytes: int, kept: int) -> None:
        super().__init__(nbytes, kept)
        self.hosts = [np.zeros(nbytes, np.uint8) for _ in range(_HOSTS)]
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


class WithheldFetch(Arrived):
    """Values that come when they are waited for."""

    def __init__(self, device: DeferringDevice, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__([tensor.detach().clone() for tensor in tensors])
        self._device = device

    def wait(self) -> list[npt.NDArray[Any]]:
        """See ``fourfold.worker.device.Fetch``."""
        self._device.waits += 1
        return super().wait()
