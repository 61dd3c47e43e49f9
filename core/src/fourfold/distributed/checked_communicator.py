"""A communicator around another one that compares what all ranks are about to do, and names the first difference.

For ``--debug-collectives``: one more exchange before every collective, and no recorded steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch

from fourfold.contracts.host_recording import refuse_recording
from fourfold.errors import EngineError, RpcTimeout

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator, Handle, PeerMemory, Receiver, Sender

_NOTE_BYTES: Final = 256


class CollectiveLog:
    """Which step runs, for messages; one for all groups of a rank."""

    def __init__(self) -> None:
        self.step = -1
        """Number of the step message; -1 before the first."""


class CheckedCommunicator:
    """See ``fourfold.contracts.communicator.Communicator``. Sends and receives pair by themselves: not compared."""

    graph_safe = False

    def __init__(self, inner: Communicator, *, group: str, ranks: tuple[int, ...], log: CollectiveLog) -> None:
        self._inner = inner
        self._group = group
        self._ranks = ranks
        self._log = log
        self.count = 0
        """Collectives so far."""

    @property
    def rank(self) -> int:
        """See Communicator."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """See Communicator."""
        return self._inner.world_size

    @property
    def channels(self) -> int:
        """See Communicator."""
        return self._inner.channels

    @property
    def deterministic(self) -> bool:
        """See Communicator."""
        return self._inner.deterministic

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        self._compare("all_reduce", tensor, channel)
        return self._inner.all_reduce(tensor, channel=channel)

    def all_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        rows = [tensor.shape[0]] * self.world_size if sizes is None else list(sizes)
        self._compare("all_gather", tensor, channel, f"rows {rows}", shape=tensor.shape[1:])
        return self._inner.all_gather(tensor, sizes=sizes, channel=channel)

    def reduce_scatter(
        self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        self._compare("reduce_scatter", tensor, channel, "" if sizes is None else f"rows {list(sizes)}")
        return self._inner.reduce_scatter(tensor, sizes=sizes, channel=channel)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        self._compare("broadcast", tensor, channel, f"from {source}")
        return self._inner.broadcast(tensor, source=source, channel=channel)

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        destination: int = 0,
        out: Sequence[torch.Tensor] | None = None,
        channel: int = 0,
    ) -> list[torch.Tensor] | None:
        """See Communicator."""
        self._compare("gather", tensor, channel, f"to {destination}")
        return self._inner.gather(tensor, destination=destination, out=out, channel=channel)

    def all_to_all(
        self, tensor: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        self._compare("all_to_all", tensor, channel, shape=tensor.shape[1:])
        return self._inner.all_to_all(tensor, send_sizes=send_sizes, receive_sizes=receive_sizes, channel=channel)

    def isend(self, tensor: torch.Tensor, destination: int, *, channel: int = 0) -> Handle:
        """See Communicator."""
        return self._inner.isend(tensor, destination, channel=channel)

    def irecv(self, tensor: torch.Tensor, source: int, *, channel: int = 0) -> Handle:
        """See Communicator."""
        return self._inner.irecv(tensor, source, channel=channel)

    def sender(self, destination: int, *, nbytes: int, depth: int) -> Sender:
        """See Communicator."""
        return self._inner.sender(destination, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> Receiver:
        """See Communicator."""
        return self._inner.receiver(source, nbytes=nbytes, depth=depth)

    def barrier(self) -> None:
        """See Communicator."""
        self._compare("barrier", None, 0)
        self._inner.barrier()

    def peer_memory(self, nbytes: int, channel: int = 0) -> PeerMemory:
        """See Communicator."""
        self._compare("peer_memory", None, channel, f"{nbytes} bytes")
        return self._inner.peer_memory(nbytes, channel)

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Communicator."""
        self._compare("all_reduce_add_rms_norm", tensor, 0)
        return self._inner.all_reduce_add_rms_norm(tensor, residual, weight, epsilon)

    def capture(self) -> AbstractContextManager[None]:
        """Nothing can be captured: a graph would leave the comparing out."""
        return nullcontext()

    def close(self) -> None:
        """See Communicator."""
        self._inner.close()

    def _compare(
        self,
        operation: str,
        tensor: torch.Tensor | None,
        channel: int,
        more: str = "",
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Exchange notes of what comes next; ``shape`` replaces the tensor's own where ranks may differ in it."""
        refuse_recording(f"{operation} under --debug-collectives")
        self.count += 1
        words = [operation]
        device = torch.device("cpu")
        if tensor is not None:
            device = tensor.device
            words += [str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape if shape is None else shape))]
        words += [word for word in (more, f"on channel {channel}" if channel else "") if word]
        note = f"{' '.join(words)} in step {self._log.step}"
        encoded = note.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).unsqueeze(0).to(device)
        try:
            notes = self._inner.all_gather(mine).cpu()
        except RpcTimeout as error:
            raise RpcTimeout(
                f"{note} (collective {self.count} of group {self._group})", error.timeout, error.missing_ranks
            ) from error
        for rank, row in zip(self._ranks, notes):
            theirs = bytes(row.numpy()).rstrip().decode(errors="replace")
            if theirs.encode() != encoded.rstrip():
                own = self._ranks[self.rank]
                raise EngineError(
                    f"collective {self.count} of group {self._group} differs: rank {own} runs {note}, "
                    f"rank {rank} runs {theirs}"
                )
