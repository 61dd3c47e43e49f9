"""Pipes over plain sends and receives of the CPU: rotating buffers of their own, and receives posted ahead.

A message is its length, eight bytes, then its bytes. Needs receives that take shorter messages than they have room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from fourfold.contracts.host_recording import refuse_recording
from fourfold.errors import EngineError

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Handle

Start = Callable[[torch.Tensor], "Handle"]
"""Begins to send, or to receive into, a uint8 tensor."""
_LENGTH_BYTES: Final = 8


class BufferedSender:
    """See ``fourfold.contracts.communicator.Sender``."""

    def __init__(self, start: Start, *, nbytes: int, depth: int) -> None:
        self._start = start
        self._slots = [torch.empty(_LENGTH_BYTES + nbytes, dtype=torch.uint8) for _ in range(depth)]
        self._handles: list[Handle | None] = [None] * depth
        self._next = 0

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See Sender."""
        refuse_recording("send")
        place = self._next % open_depth(self._slots)
        slot = self._slots[place]
        length = sum(part.nbytes for part in parts)
        check_fits(length, len(slot) - _LENGTH_BYTES)
        if (handle := self._handles[place]) is not None:
            self._handles[place] = None
            handle.wait()
        slot[:_LENGTH_BYTES].view(torch.int64)[0] = length
        for piece, part in split(slot[_LENGTH_BYTES:], parts):
            piece.copy_(part)
        self._handles[place] = self._start(slot[: _LENGTH_BYTES + length])
        self._next += 1

    def close(self) -> None:
        """See Sender."""
        self._slots.clear()
        self._handles.clear()


class BufferedReceiver:
    """See ``fourfold.contracts.communicator.Receiver``."""

    def __init__(self, start: Start, *, nbytes: int, depth: int) -> None:
        self._start = start
        self._slots = [torch.empty(_LENGTH_BYTES + nbytes, dtype=torch.uint8) for _ in range(depth)]
        self._handles = [start(slot) for slot in self._slots]
        self._next = 0
        self._emptied: int | None = None

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """See Receiver."""
        refuse_recording("receive")
        place = self._next % open_depth(self._slots)
        if self._emptied is not None:  # only now: there is time while this one is waited for
            self._handles[self._emptied] = self._start(self._slots[self._emptied])
        self._handles[place].wait()
        slot = self._slots[place]
        length = int(slot[:_LENGTH_BYTES].view(torch.int64)[0])
        for piece, part in split(slot[_LENGTH_BYTES : _LENGTH_BYTES + length], parts):
            part[: len(piece)].copy_(piece)
        self._emptied = place
        self._next += 1
        return length

    def close(self) -> None:
        """See Receiver."""
        self._slots.clear()
        self._handles.clear()


def open_depth(slots: Sequence[torch.Tensor]) -> int:
    """How many slots a pipe has; raises EngineError where it has been closed."""
    if not slots:
        raise EngineError("this pipe is closed")
    return len(slots)


def check_fits(length: int, nbytes: int) -> None:
    """Raise EngineError for a message that is longer than its pipe was made for."""
    if length > nbytes:
        raise EngineError(f"a message of {length} bytes does not fit a pipe for messages of up to {nbytes}")


def split(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """(piece of a uint8 message, part as uint8), in order; pieces are shorter where the message ends early."""
    first = 0
    for part in parts:
        yield message[first : first + part.nbytes], part.view(-1).view(torch.uint8)
        first += part.nbytes
