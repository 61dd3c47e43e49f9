"""What an engine core needs of whoever runs its steps, so that tests can stand there. Knows no executor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fourfold.engine.adapters import AdapterClient
from fourfold.engine.sleep import MemoryClient
from fourfold.errors import EngineError
from fourfold.messages import StageFigures, StepMessage, StepOutput


class StepReply(Protocol):
    """What one step will bring."""

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for it; raises TimeoutError, and what ended the step."""


class StepClient(MemoryClient, AdapterClient, Protocol):
    """What the core needs of ``fourfold.engine.executor_client.ExecutorClient``."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be started before the first one's result is taken."""

    def execute_model(self, message: StepMessage) -> StepReply:
        """Start a step; steps run in the order of calls."""

    def stage_figures(self) -> Future[list[StageFigures]]:
        """What each stage of a pipeline says of itself."""

    def layer_report(self) -> list[dict[str, Any]]:
        """What the layers of each stage show."""

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once when the workers are lost for good; at once if they are."""

    def shutdown(self) -> None:
        """End all workers."""
