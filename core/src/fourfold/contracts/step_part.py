"""The step-part contract: what layers of one decoder have in common, where it does something between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class StepVote(NamedTuple):
    """What an engine puts into a step that it makes together with others; reduced, the same for all."""

    has_work: bool
    """Reduced by or."""
    may_pause: bool
    """Reduced by and."""

    def reduce(self, other: StepVote) -> StepVote:
        """Both as one."""
        return StepVote(self.has_work or other.has_work, self.may_pause and other.may_pause)


TakeTurns = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs each of the given calls once, in turns, and returns their results."""


class StepPart(Protocol):
    """One a decoder and rank. All ranks of its layers call alike, of all engines where they share layers."""

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        """Before the layers of a step of ``num_tokens``; what the votes of all engines come to.

        ``is_decode``: every request has one token. Without tokens no layer will be called: it does now what others need
        of this rank.
        """

    def begin_recording(self, num_tokens: int) -> None:
        """Before a decode step of ``num_tokens`` is recorded: what it does then depends on their number alone."""

    def take_turns(self, num_tokens: int) -> TakeTurns | None:
        """What runs the two halves of this step's tokens through the layers in turns; None: they stay together."""

    def end_step(self) -> None:
        """After the layers of a step; may talk to the other ranks."""

    def counters(self) -> Mapping[str, float]:
        """Named figures for ``/metrics``, the same on every rank."""

    def report(self) -> Mapping[str, Any]:
        """What ``/topology`` shows of the layers, as plain values under names; empty: nothing."""

    def close(self) -> None:
        """Release everything; idempotent."""
