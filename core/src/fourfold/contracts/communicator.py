"""The communicator contract: collectives of one group on one device type."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Handle(Protocol):
    """A send or receive in the air."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until done; raises RpcTimeout past ``timeout`` seconds."""


class PeerMemory(Protocol):
    """Memory that every rank of a group can read and write directly."""

    def buffer(self, rank: int) -> torch.Tensor:
        """The uint8 [nbytes] buffer of a rank in the group, mapped here."""

    def barrier(self) -> None:
        """Return when all ranks have arrived and their writes are visible."""

    def close(self) -> None:
        """Unmap; idempotent."""


class Sender(Protocol):
    """One end of a pipe: messages to one rank, in order."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send the bytes of ``parts``, contiguous tensors, as one message; they may change once this returns.

        Waits only while the peer has left as many messages as the pipe is deep; raises RpcTimeout naming it.
        """

    def close(self) -> None:
        """Release what it owns; what the peer has not received by then may be lost. Idempotent."""


class Receiver(Protocol):
    """The other end."""

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """Fill contiguous tensors with the next message, one after the other, and return its length in bytes.

        A message of another length than theirs fills what it can. On a device that orders work itself, this returns
        once the receiving is ordered; sizes must then be known to be right. Raises RpcTimeout naming the peer.
        """

    def close(self) -> None:
        """Release what it owns; idempotent."""


class Communicator(Protocol):
    """Collectives over the ranks of one group. Ranks are ranks in the group. A group of one rank has none.

    On a device a collective returns when it is queued: ``barrier`` waits for the device, and raises RpcTimeout naming
    ranks that what was queued has waited for in vain.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def channels(self) -> int:
        """How many independent channels may be used at once, for overlap."""

    @property
    def graph_safe(self) -> bool:
        """Whether the collectives may be captured in a device graph."""

    @property
    def deterministic(self) -> bool:
        """Whether all ranks get the same bits, every time."""

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """Sum over the ranks; same shape and dtype; may reuse ``tensor``'s memory."""

    def all_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0) -> torch.Tensor:
        """Concatenate along dim 0 in rank order; ``sizes`` gives each rank's rows when they differ."""

    def reduce_scatter(
        self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0
    ) -> torch.Tensor:
        """Sum, then keep this rank's rows of dim 0."""

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, channel: int = 0) -> torch.Tensor:
        """Copy ``source``'s tensor to every rank, in place."""

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        destination: int = 0,
        out: Sequence[torch.Tensor] | None = None,
        channel: int = 0,
    ) -> list[torch.Tensor] | None:
        """All ranks' tensors on ``destination``, None elsewhere.

        ``out``, which only ``destination`` may give, are tensors of their shape to fill in place of new ones; rows
        of them may lie apart.
        """

    def all_to_all(
        self, tensor: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], channel: int = 0
    ) -> torch.Tensor:
        """Send ``send_sizes[r]`` rows of dim 0 to rank r and receive ``receive_sizes[r]`` rows from it."""

    def isend(self, tensor: torch.Tensor, destination: int, *, channel: int = 0) -> Handle:
        """Start sending; the tensor must stay as it is until the handle is waited on."""

    def irecv(self, tensor: torch.Tensor, source: int, *, channel: int = 0) -> Handle:
        """Start receiving into ``tensor``."""

    def sender(self, destination: int, *, nbytes: int, depth: int) -> Sender:
        """A pipe to ``destination``, which opens its end meanwhile, for messages of up to ``nbytes``.

        ``depth`` messages fit in without being received. Pipes do not wait for each other, nor for collectives.
        """

    def receiver(self, source: int, *, nbytes: int, depth: int) -> Receiver:
        """The other end of a pipe from ``source``; two ranks open their pipes in the same order."""

    def barrier(self) -> None:
        """Return when all ranks have arrived."""

    def peer_memory(self, nbytes: int, channel: int = 0) -> PeerMemory:
        """Shared memory of ``nbytes`` a rank; raises Unsupported where there is none."""

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += sum(tensor)``; returns (rms_norm(residual) * weight, residual). May raise Unsupported.

        The norm may take ``tensor``'s memory.
        """

    def capture(self) -> AbstractContextManager[None]:
        """The scope in which a device graph that uses this communicator is captured."""

    def close(self) -> None:
        """Release everything; idempotent."""
