"""What a route's writer does: choices to JSON, whole or event by event. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from fourfold.text.output_processor import Delta
from fourfold_server.usage import Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """What the answer and every chunk of it repeat."""

    request_id: str
    created: int
    """Unix seconds."""
    model: str
    include_usage: bool
    """Whether a stream ends with a chunk of usage."""

    @property
    def no_usage(self) -> UnsetType | None:
        """What chunks before the last say of usage: with usage to come that there is none yet, else nothing."""
        return None if self.include_usage else UNSET


class AnswerWriter(Protocol):
    """Writes one request's answer; all results are JSON."""

    def whole(self, deltas: Mapping[int, Delta], usage: Usage) -> bytes:
        """The answer to a request that is not streamed."""

    def chunks(self, index: int, delta: Delta) -> list[bytes]:
        """What is new of one choice; often one chunk, none when there is nothing to show."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk that ends a stream with usage."""
