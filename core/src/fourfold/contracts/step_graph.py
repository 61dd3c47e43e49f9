"""The step-graph contract: record a decode step once per batch size, replay it at each step.

An ``Operators`` object that also offers these methods is a recorder; one that does not is never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class StepGraph(Protocol):
    """One recorded step."""

    def replay(self) -> torch.Tensor:
        """Run the step again on what its input tensors hold now; returns the output tensor, overwritten each time.

        Other tensors that the recorded step has made are overwritten too, as long as somebody holds them.
        """

    def close(self) -> None:
        """Release what was recorded; idempotent."""


@runtime_checkable
class StepRecorder(Protocol):
    """Records steps of S sequences with one token each."""

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        """The S worth recording, ascending, at most ``max_batch_size``; a batch is padded to the next one.

        Batches above the last are not recorded. Padding rows have slot -1, sequence length 1 and block 0.
        """

    def capture(self, step: Callable[[], torch.Tensor]) -> StepGraph:
        """Record ``step``, at the first use of a batch size. Whether it computes meanwhile is open: no result is used.

        Inputs and KV cache stay at their addresses and are read anew at each replay: token ids, positions, and all
        tensors of the attention metadata. The metadata's numbers and lists on the host are upper bounds meanwhile.
        Raises Unsupported, leaving no trace, when some part of the step cannot be recorded; steps then run plainly.
        """
