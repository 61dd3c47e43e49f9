"""A pipe between two ranks over NCCL: a communicator and a stream of its own, and rotating buffers on the device.

Everything is ordered on streams: the host waits for nothing. Lengths are not sent, so both ends must know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from fourfold.distributed.buffered_pipe import check_fits, open_depth, split

_SENDER: Final = 0
_RECEIVER: Final = 1
"""Places in the group of a pipe."""


class NcclSender:
    """See ``fourfold.contracts.communicator.Sender``; parts may change on the current stream once this returns."""

    def __init__(self, group: Any, device: torch.device, *, nbytes: int, depth: int) -> None:
        """``group`` is a process group of the two ranks alone, the sender first."""
        self._group = group
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._works: list[Any] = [None] * depth
        self._next = 0
        group.send([self._slots[0][:1]], _RECEIVER, 0).wait()  # connects: nothing later waits for that

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See Sender."""
        place = self._next % open_depth(self._slots)
        slot = self._slots[place]
        length = sum(part.nbytes for part in parts)
        check_fits(length, len(slot))
        if self._works[place] is not None:
            self._works[place].wait()  # the current stream does, before it overwrites the buffer
        for piece, part in split(slot, parts):
            piece.copy_(part)
        self._works[place] = self._group.send([slot[:length]], _RECEIVER, 0) if length else None
        self._next += 1

    def close(self) -> None:
        """See Sender."""
        if self._slots:
            self._slots.clear()
            self._works.clear()
            self._group.abort()  # a receiver that is gone would be waited for otherwise


class NcclReceiver:
    """See ``fourfold.contracts.communicator.Receiver``; returns once the receiving is ordered on the current stream."""

    def __init__(self, group: Any, device: torch.device, *, nbytes: int, depth: int) -> None:
        """See NcclSender."""
        self._group = group
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._emptied = [torch.cuda.Event() for _ in range(depth)]  # type: ignore[no-untyped-call]
        # Receives are ordered after what empties their buffer, and not after all else that the device has to do.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._next = 0
        group.recv([self._slots[0][:1]], _SENDER, 0).wait()
        torch.cuda.current_stream(device).synchronize()

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """See Receiver."""
        place = self._next % open_depth(self._slots)
        slot = self._slots[place]
        length = sum(part.nbytes for part in parts)
        check_fits(length, len(slot))
        if length:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._emptied[place])
                work = self._group.recv([slot[:length]], _SENDER, 0)
            work.wait()
        for piece, part in split(slot, parts):
            part.copy_(piece)
        self._emptied[place].record()
        self._next += 1
        return length

    def close(self) -> None:
        """See Receiver."""
        if self._slots:
            self._slots.clear()
            self._group.abort()
