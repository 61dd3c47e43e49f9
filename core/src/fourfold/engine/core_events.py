"""What an engine core tells plugins."""

from __future__ import annotations

from typing import Protocol

from fourfold.messages import EngineStats, RequestOutput


class CoreEvents(Protocol):
    """``fourfold.plugins`` has one that calls their hooks."""

    def step_finished(self, stats: EngineStats) -> None:
        """After every step."""

    def request_finished(self, output: RequestOutput) -> None:
        """After a request's last output."""
