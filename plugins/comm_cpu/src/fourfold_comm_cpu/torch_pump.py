"""The slow twin of ``NativePump``, for hosts without a compiler: the same memory, looked at every now and then.

Its counters are plain stores, which other cores see in order on x86 only; the communicator refuses elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fourfold.distributed.buffered_pipe import split
from fourfold_comm_cpu.layout import LINE

if TYPE_CHECKING:
    from fourfold_comm_cpu.layout import PipeLayout

_YIELDS: Final = 200
_PAUSE: Final = 0.0005


class TorchPump:
    """See ``fourfold_comm_cpu.pipe.Pump``."""

    def __init__(self, memory: torch.Tensor, layout: PipeLayout, timeout: float) -> None:
        counters = memory[: layout.slots].numpy().view(np.uint64).reshape(-1, LINE // 8)
        self._sent, self._taken = counters[0], counters[1]
        self._slots = memory[layout.slots : layout.total_bytes].view(layout.depth, LINE + layout.slot_bytes)
        self._timeout = timeout
        self._pause = threading.Event()  # never set: a way to wait for a time

    def send(self, parts: Sequence[torch.Tensor]) -> bool:
        """See Pump."""
        number = int(self._sent[0])
        if not self._comes_true(lambda: number - int(self._taken[0]) < len(self._slots)):
            return False
        slot = self._slots[number % len(self._slots)]
        slot[:8].view(torch.int64)[0] = sum(part.nbytes for part in parts)
        for piece, part in split(slot[LINE:], parts):
            piece.copy_(part)
        self._sent[0] = number + 1
        return True

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """See Pump."""
        number = int(self._taken[0])
        if not self._comes_true(lambda: int(self._sent[0]) != number):
            return -1
        slot = self._slots[number % len(self._slots)]
        length = min(int(slot[:8].view(torch.int64)[0]), len(slot) - LINE)
        for piece, part in split(slot[LINE : LINE + length], parts):
            part[: len(piece)].copy_(piece)
        self._taken[0] = number + 1
        return length

    def _comes_true(self, ready: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._timeout
        looks = 0
        while not ready():
            if time.monotonic() > deadline:
                return False
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
            else:
                self._pause.wait(_PAUSE)
        return True
