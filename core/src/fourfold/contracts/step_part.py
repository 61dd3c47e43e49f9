"""The step-part contract: what layers of one decoder have in common, where it does something between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class StepPart(Protocol):
    """One a decoder and rank. All ranks of its layers call alike."""

    def end_step(self) -> None:
        """After the layers of a step; may talk to the other ranks."""

    def counters(self) -> Mapping[str, float]:
        """Named figures for ``/metrics``, the same on every rank."""

    def close(self) -> None:
        """Release everything; idempotent."""
