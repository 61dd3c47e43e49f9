"""Zeroed counters on the device, for kernels that find their last program. Knows no kernel."""

from __future__ import annotations

from typing import Final

import torch

_FEWEST: Final = 1024


class Counters:
    """Grows as asked. What was handed out stays where it is: recorded launches hold its address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept = [torch.zeros(_FEWEST, dtype=torch.int32, device=device)]

    def at_least(self, number: int) -> torch.Tensor:
        """int32 zeros, ``number`` of them or more; every launch leaves them zero."""
        if len(self._kept[-1]) < number:
            length = 1 << (number - 1).bit_length()
            self._kept.append(torch.zeros(length, dtype=torch.int32, device=self._device))
        return self._kept[-1]
