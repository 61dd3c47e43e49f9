"""What an engine loop needs of the engine core that it feeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from fourfold.contracts.step_part import StepVote
from fourfold.coordinator.waves import PauseMode
from fourfold.messages import AddRequest, EngineStats, RequestOutput


class ServedCore(Protocol):
    """One thread calls it; ``fourfold.engine.engine_core.EngineCore`` is one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def stats(self) -> EngineStats:
        """The engine as it stands."""

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Take a request; returns its only output if it is refused."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""

    def abort_client(self, client: int, died: float) -> None:
        """End all requests that an API server had when it died, in Unix seconds."""

    def step(self) -> Mapping[int, list[RequestOutput]]:
        """Advance; returns the outputs of each API server."""

    def step_together(self, vote: StepVote) -> tuple[Mapping[int, list[RequestOutput]], StepVote]:
        """Advance at the same time as other engines, with or without work; also what the votes of all come to."""

    def settle(self) -> Iterator[Mapping[int, list[RequestOutput]]]:
        """Wait for the steps in the air; yields what each brings."""

    def pause(self, mode: PauseMode) -> Mapping[int, list[RequestOutput]]:
        """Let no request begin, and none go on unless ``mode`` says so; returns the outputs of each API server."""

    def confirm_pause(self) -> None:
        """Whoever had to go on has."""

    def resume(self) -> None:
        """Go on, unless something sleeps."""

    def prefix_marks(self) -> bytes:
        """What the prefix cache holds."""
