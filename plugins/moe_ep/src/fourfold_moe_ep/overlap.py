"""Whether a step is cut in two microbatches, which of them runs, and what they hand over for: one for all layers of a
decoder on one rank.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fourfold.contracts.host_recording import current_recorder
from fourfold.contracts.split_sum import SplitSums
from fourfold_moe_ep.microbatch import GreenletTurns, MicrobatchContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from fourfold.config.parallel_config import ParallelConfig
    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.step_part import StepVote, TakeTurns
    from fourfold.entries import ParallelLayerContext

_KEY: Final = "overlap"

log = logging.getLogger(__name__)


class Overlap:
    """See ``fourfold.contracts.step_part.StepPart``. All ranks that talk to each other decide alike: by the tokens of a
    step, and where engines step together by what their votes come to.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        never = sys.maxsize
        self._least_to_cut = (
            max(2, parallel.dbo_prefill_tokens) if parallel.enable_dbo else never,
            max(2, parallel.dbo_decode_tokens) if parallel.enable_dbo else never,
        )
        """Tokens from which a step is cut in two: of one with prompts, and of decodes alone."""
        self._enabled = parallel.enable_dbo
        self._pays = False
        self._told = False
        self.cut = False
        """Whether the present step is; another part of the decoder may decide so after ``begin_step``."""
        self._microbatch: MicrobatchContext | None = None
        """The one that runs."""
        self._num_cut = 0

    def expect(self) -> None:
        """Note that the layers have something to hand over for."""
        self._pays = True

    def expect_sums(self, communicator: Communicator | None) -> None:
        """The same of sums over ``communicator``, if it can start one and wait for it later."""
        if isinstance(communicator, SplitSums):
            self._pays = True
        elif self._enabled and communicator is not None and not self._told:
            self._told = True
            log.warning("the sums of rank %d are not overlapped: its communicator only sums at once", communicator.rank)

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        """See StepPart."""
        self.cut = self._pays and num_tokens >= self._least_to_cut[is_decode]
        return vote

    def begin_recording(self, num_tokens: int) -> None:
        """See StepPart; all of them are decodes."""
        self.cut = self._pays and num_tokens >= self._least_to_cut[True]

    def take_turns(self, num_tokens: int) -> TakeTurns | None:
        """See StepPart; a step that is recorded on the host stays whole."""
        return self._run_in_turns if self.cut and current_recorder() is None else None

    def hand_over(self) -> None:
        """Let the other microbatch go on, if there is one, while what this one has sent is on its way."""
        microbatch = self._microbatch
        if microbatch is not None:
            microbatch.yield_to_other()
            self._microbatch = microbatch

    def all_reduce(self, communicator: Communicator | None, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, for which a microbatch hands over; None has one rank."""
        if communicator is None:
            return tensor
        if self._microbatch is None or not isinstance(communicator, SplitSums):
            return communicator.all_reduce(tensor)
        started = communicator.start_all_reduce(tensor, channel=self.line(communicator))
        self.hand_over()
        return started.wait()

    @property
    def half(self) -> int | None:
        """The microbatch that runs, 0 or 1; None: the step is whole."""
        return None if self._microbatch is None else self._microbatch.index

    @property
    def channel(self) -> int:
        """Of what the present microbatch has in the air."""
        return self.half or 0

    def line(self, communicator: Communicator) -> int:
        """The same in a communicator, which may have one channel only: there things come in the order of the calls."""
        return min(self.channel, communicator.channels - 1)

    def end_step(self) -> None:
        """See StepPart."""

    def counters(self) -> Mapping[str, float]:
        """See StepPart."""
        return {"overlapped_steps": float(self._num_cut)} if self._enabled else {}

    def report(self) -> Mapping[str, Any]:
        """See StepPart."""
        return {}

    def close(self) -> None:
        """See StepPart."""

    def _run_in_turns(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        self._num_cut += 1
        try:
            return GreenletTurns().run([partial(self._run_microbatch, body) for body in bodies])
        finally:
            self._microbatch = None

    def _run_microbatch(self, body: Callable[[], Any], microbatch: MicrobatchContext) -> Any:
        self._microbatch = microbatch
        return body()


def overlap_of(context: ParallelLayerContext) -> Overlap:
    """The one of this decoder, made by whichever of its layers comes first."""
    found = context.shared.get(_KEY)
    if not isinstance(found, Overlap):
        found = context.shared[_KEY] = Overlap(context.config.parallel)
    return found
