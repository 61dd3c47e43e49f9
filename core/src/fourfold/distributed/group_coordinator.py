"""One group of ranks as layers and stages see it: collectives that cost nothing where the group is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.communicator import Communicator


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
        """Concatenate along dim 0 in rank order."""
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

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        if self.communicator is not None:
            self.communicator.barrier()

    def capture(self) -> AbstractContextManager[None]:
        """The scope in which a device graph that uses this group is captured."""
        return nullcontext() if self.communicator is None else self.communicator.capture()

    def close(self) -> None:
        """Release the communicator; idempotent."""
        if self.communicator is not None:
            self.communicator.close()
