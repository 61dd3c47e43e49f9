"""The split-sum contract: what a communicator also offers whose sums are started, and waited for later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class PendingSum(Protocol):
    """A sum in the air."""

    def wait(self) -> torch.Tensor:
        """What ``all_reduce`` would have returned, and the errors that it would have raised; asked for once."""


@runtime_checkable
class SplitSums(Protocol):
    """What lets a rank compute while a sum is on its way."""

    def start_all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> PendingSum:
        """Start ``all_reduce``; ``tensor`` belongs to the sum until it has been waited for.

        One may be in the air in each channel, and several in one where the communicator has only one. Any other
        collective in the channel comes after it: it may wait for the sum first. Cannot be recorded on a host.
        """
