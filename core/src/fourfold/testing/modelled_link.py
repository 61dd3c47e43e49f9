"""A link whose sums take a while, in the time of a clock, and what microbatches can at best make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Clock(Protocol):
    """Seconds that pass for a link and for whoever computes."""

    def now(self) -> float:
        """The time in seconds."""

    def wait(self, until: float) -> None:
        """Return at a time, at once if it has passed."""


class VirtualClock:
    """Time passes by waiting alone."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """See Clock."""
        return self._now

    def wait(self, until: float) -> None:
        """See Clock."""
        self._now = max(self._now, until)


class ModelledLink:
    """What ``fourfold.contracts.split_sum.SplitSums`` asks of a communicator, of two ranks that are one.

    One sum travels at a time. It doubles what it is given, so that a missing one shows.
    """

    rank, world_size, channels = 0, 2, 2

    def __init__(self, clock: Clock, seconds: float) -> None:
        """``seconds``: what a sum takes."""
        self._clock, self._seconds = clock, seconds
        self._free_at = 0.0
        self.trace: list[str] = []
        """What began and ended in which channel, in order."""

    def start_all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> TravellingSum:
        """See SplitSums."""
        self._free_at = max(self._free_at, self._clock.now()) + self._seconds
        self.trace.append(f"start {channel}")
        return TravellingSum(self, tensor, channel, self._free_at)

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        return self.start_all_reduce(tensor, channel=channel).wait()

    def arrive(self, channel: int, at: float) -> None:
        """Let time pass until a sum is there."""
        self._clock.wait(at)
        self.trace.append(f"sum {channel}")


class TravellingSum:
    """See ``fourfold.contracts.split_sum.PendingSum``."""

    def __init__(self, link: ModelledLink, tensor: torch.Tensor, channel: int, at: float) -> None:
        self._link, self._tensor, self._channel, self._at = link, tensor, channel, at

    def wait(self) -> torch.Tensor:
        """See PendingSum."""
        self._link.arrive(self._channel, self._at)
        return 2 * self._tensor


def overlapped_seconds(num_sums: int, compute: float, travel: float) -> float:
    """What a step of two microbatches takes at best, each of which computes ``compute`` seconds before each of its
    ``num_sums`` sums of ``travel`` seconds: it computes when the processor is free and its last sum is there.
    """
    processor = link = 0.0
    there = [0.0, 0.0]
    for _ in range(num_sums):
        for half in range(2):
            processor = max(processor, there[half]) + compute
            link = max(link, processor) + travel
            there[half] = link
    return max(there)
