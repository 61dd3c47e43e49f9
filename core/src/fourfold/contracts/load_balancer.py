"""The load-balancer contract: which engine takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """One engine as an API server sees it: its last report, corrected by what was sent since."""

    engine: int
    ready: bool
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    """Prompt and remaining output tokens of its requests."""
    kv_cache_usage: float
    """0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedRequest:
    """What a balancer may look at."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    cache_salt: str


class LoadBalancer(Protocol):
    """Chooses an engine for each request; told when requests end."""

    def choose(self, request: BalancedRequest, loads: Sequence[EngineLoad]) -> int:
        """The ``engine`` number of one of ``loads`` (all ready, never empty)."""
