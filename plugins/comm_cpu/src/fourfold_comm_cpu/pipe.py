"""One end of a pipe of shared memory between two ranks: the sender fills slots in order, the receiver empties them.

The slots are the send buffers: a message is copied twice, from the sender's tensors and into the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fourfold.contracts.host_recording import refuse_recording
from fourfold.distributed.buffered_pipe import check_fits
from fourfold.errors import EngineError, RpcTimeout

if TYPE_CHECKING:
    import torch


class Pump(Protocol):
    """Moves messages through the memory of a pipe. Two are: ``NativePump``, and its slow twin ``TorchPump``."""

    def send(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether there was room in time."""

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """The length of the next message; -1 when none came in time."""


class SharedSender:
    """See ``fourfold.contracts.communicator.Sender``."""

    def __init__(self, pump: Pump, nbytes: int, late: Callable[[], RpcTimeout]) -> None:
        """``late`` makes the error of a peer that did not come in time."""
        self._pump: Pump | None = pump
        self._nbytes = nbytes
        self._late = late

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See Sender."""
        refuse_recording("send")
        check_fits(sum(part.nbytes for part in parts), self._nbytes)
        if not _opened(self._pump).send(parts):
            raise self._late()

    def close(self) -> None:
        """Let go of the memory."""
        self._pump = None


class SharedReceiver:
    """See ``fourfold.contracts.communicator.Receiver``."""

    def __init__(self, pump: Pump, late: Callable[[], RpcTimeout]) -> None:
        """``late`` makes the error of a peer that did not come in time."""
        self._pump: Pump | None = pump
        self._late = late

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """See Receiver."""
        refuse_recording("receive")
        length = _opened(self._pump).receive(parts)
        if length < 0:
            raise self._late()
        return length

    def close(self) -> None:
        """Let go of the memory."""
        self._pump = None


def _opened(pump: Pump | None) -> Pump:
    if pump is None:
        raise EngineError("this pipe is closed")
    return pump
