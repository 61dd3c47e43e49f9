"""One group of ranks as layers and stages see it: collectives that cost nothing where the group is one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourfold.distributed.tensor_message import ReceivedTensors, SentTensors, broadcast_value, count_votes
from fourfold.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.communicator import Communicator, Handle, Receiver, Sender


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCoordinator:
    """The ranks of one group and this process' place among them. Ranks in arguments are ranks in the group."""

    name: str
    """``tp``, ``pp``, ``dp`` or ``ep``."""
    ranks: tuple[int, ...]
    """Global ranks, in order."""
    rank: int
    communicator: Communicator | None = None
    """None exactly when the group is one rank."""
    host: Communicator | None = None
    """Moves metadata, on the CPU; None: ``communicator`` does."""
    link: str = ""
    """The communicator's name."""
    hosts: tuple[int, ...] = ()
    """A number for each rank, the same for ranks of one host; empty where nobody has asked."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.ranks):
            raise ConfigError(f"rank {self.rank} is outside the {self.name} group {list(self.ranks)}")
        if (self.communicator is None) != (len(self.ranks) == 1):
            needs = "takes no" if len(self.ranks) == 1 else "needs a"
            raise ConfigError(f"the {self.name} group {list(self.ranks)} {needs} communicator")

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the group's last rank."""
        return self.rank == len(self.ranks) - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; may reuse ``tensor``'s memory."""
        return tensor if self.communicator is None else self.communicator.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate along dim 0 in rank order; ``sizes`` gives each rank's rows when they differ."""
        return tensor if self.communicator is None else self.communicator.all_gather(tensor, sizes=sizes)

    def reduce_scatter(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Sum, then keep this rank's rows of dim 0."""
        return tensor if self.communicator is None else self.communicator.reduce_scatter(tensor, sizes=sizes)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Copy ``source``'s tensor to every rank, in place."""
        return tensor if self.communicator is None else self.communicator.broadcast(tensor, source=source)

    def gather(self, tensor: torch.Tensor, *, destination: int = 0) -> list[torch.Tensor] | None:
        """All ranks' tensors on ``destination``, None elsewhere."""
        return [tensor] if self.communicator is None else self.communicator.gather(tensor, destination=destination)

    def all_to_all(
        self, tensor: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send ``send_sizes[r]`` rows of dim 0 to rank r and receive ``receive_sizes[r]`` rows from it."""
        if self.communicator is None:
            return tensor
        return self.communicator.all_to_all(tensor, send_sizes=send_sizes, receive_sizes=receive_sizes)

    def isend(self, tensor: torch.Tensor, destination: int) -> Handle:
        """Start sending; ``tensor`` must stay as it is until the handle is waited on."""
        return self._peers("isend").isend(tensor, destination)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        """Start receiving into ``tensor``."""
        return self._peers("irecv").irecv(tensor, source)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send, and wait until ``tensor`` may change."""
        self.isend(tensor, destination).wait()

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor``."""
        self.irecv(tensor, source).wait()
        return tensor

    def sender(self, destination: int, *, nbytes: int, depth: int) -> Sender:
        """See ``fourfold.contracts.communicator.Communicator``."""
        return self._peers("sender").sender(destination, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> Receiver:
        """See ``fourfold.contracts.communicator.Communicator``."""
        return self._peers("receiver").receiver(source, nbytes=nbytes, depth=depth)

    def isend_tensors(self, tensors: Mapping[str, torch.Tensor], destination: int) -> Handle:
        """Start sending named tensors of any dtypes and shapes; they must stay until the handle is waited on."""
        return SentTensors(tensors, self._peers("isend_tensors"), self._host(), destination)

    def irecv_tensors(self, source: int, *, device: torch.device) -> ReceivedTensors:
        """Start receiving named tensors; ``wait`` of what is returned gives them."""
        return ReceivedTensors(self._peers("irecv_tensors"), self._host(), source, device)

    def broadcast_object(self, value: Any = None, *, source: int = 0) -> Any:
        """``source``'s value on every rank: numbers, text, lists, dicts, tensors and what else msgpack carries."""
        return value if self.communicator is None else broadcast_value(value, self._host(), source)

    def all_agree(self, vote: bool) -> bool:
        """Whether every rank votes so."""
        return vote if self.communicator is None else count_votes(vote, self._host()) == self.world_size

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        if self.communicator is not None:
            self._host().barrier()

    def capture(self) -> AbstractContextManager[None]:
        """The scope in which a device graph that uses this group is captured."""
        return nullcontext() if self.communicator is None else self.communicator.capture()

    def close(self) -> None:
        """Release the communicators; idempotent."""
        if self.communicator is not None:
            self.communicator.close()
        if self.host is not None and self.host is not self.communicator:
            self.host.close()

    def _peers(self, operation: str) -> Communicator:
        if self.communicator is None:
            raise ConfigError(f"{operation} in the {self.name} group, where rank {self.ranks[0]} is alone")
        return self.communicator

    def _host(self) -> Communicator:
        return self.host or self._peers("metadata")
