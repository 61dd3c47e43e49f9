"""What the shared-memory communicator needs of a channel; tensors are contiguous, on the CPU, and checked by it.

Two things are channels: ``NativeChannel``, and its slow twin ``TorchChannel`` where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fourfold.errors import EngineError, RpcTimeout

if TYPE_CHECKING:
    import torch


class Channel(Protocol):
    """Collectives in one stretch of shared memory, one at a time; ranks are ranks in the group."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place."""

    def start_all_reduce(self, tensor: torch.Tensor) -> None:
        """The half of ``all_reduce`` that waits for nobody; no other collective may run before the other half."""

    def finish_all_reduce(self, tensor: torch.Tensor) -> None:
        """The other half, with the same tensor."""

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor, nbytes: Sequence[int]) -> None:
        """Into ``out`` ``nbytes[r]`` bytes of every rank r, in order."""

    def gather(self, tensor: torch.Tensor, out: Sequence[torch.Tensor], destination: int) -> None:
        """On ``destination``, what rank r has into ``out[r]``, whose rows are dense; ``out`` is empty elsewhere."""

    def reduce_scatter(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        """Into ``out`` the sum of this rank's elements; rank r has ``counts[r]``."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite with ``source``'s, in place."""

    def all_to_all(self, tensor: torch.Tensor, out: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """``send[r]`` bytes to rank r, ``receive[r]`` bytes from it, in rank order."""

    def barrier(self) -> None:
        """Return when all have arrived."""

    def push(self, destination: int, data: torch.Tensor) -> int:
        """Write what fits of uint8 ``data`` into the ring to ``destination``; returns how many bytes went."""

    def pull(self, source: int, data: torch.Tensor) -> int:
        """Read what is there into uint8 ``data``; returns how many bytes came."""

    def wait_for_message(self, sources: Sequence[int], destinations: Sequence[int], seconds: float) -> None:
        """Return when a ring from ``sources`` or to ``destinations`` may have moved since it was last found stuck."""

    def close(self) -> None:
        """Let go of the memory; idempotent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Who a channel is, for its work and for messages."""

    group: str
    ranks: tuple[int, ...]
    """Global ranks."""
    rank: int
    """In the group."""
    timeout: float
    crowded: bool
    """Whether there are more ranks than cores, so that spinning takes a core from who is waited for."""

    def missing(self, operation: str, places: Sequence[int]) -> RpcTimeout:
        """The error of ranks that did not come."""
        return RpcTimeout(f"{operation} in group {self.group}", self.timeout, [self.ranks[place] for place in places])

    def different(self, operation: str, places: Sequence[int]) -> EngineError:
        """The error of ranks that do something else."""
        others = ", ".join(str(self.ranks[place]) for place in places)
        return EngineError(
            f"rank {self.ranks[self.rank]} runs {operation} in group {self.group}, and rank(s) {others} run something "
            "else; the ranks have diverged, --debug-collectives tells where"
        )
