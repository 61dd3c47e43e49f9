"""What all routes of one API server share. Knows no route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.client.engine_client import EngineClient
from fourfold.contracts.load_balancer import EngineState
from fourfold.errors import RequestError
from fourfold.process_messages import RestartEngine
from fourfold.supervision.deployment_state import WatchedState, WishedAdapter
from fourfold.text.served_model import ServedModel
from fourfold_server.config import ServerConfig
from fourfold_server.metrics import Metrics
from fourfold_server.operations import Operations
from fourfold_server.text_pool import TextPool

CATCH_UP_SECONDS = 0.05
"""Many times what a message takes, and little enough for a probe while an operation is under way."""


@dataclass(kw_only=True, slots=True)
class ServerState:
    """Built by whoever starts the server, which also sets ``model`` and ``draining`` when the time comes."""

    config: ServerConfig
    client: EngineClient
    served_names: tuple[str, ...]
    """The first is the one in replies."""
    topology: Callable[[], dict[str, Any]]
    restart_engine: Callable[[RestartEngine], None] = field(default=lambda order: None)
    """Wishes a replica restarted."""
    shared_metrics: Path | None = None
    """Where all API servers of the deployment keep their instruments; None: there is one."""
    bound: bool = False
    """Whether the replicas share experts: none is restarted without all others."""
    operation_timeout: float = 600.0
    """Seconds that all engines may take for one step of an operation."""
    stall_timeout: float = 60.0
    """Seconds without a step, with requests running, after which /health fails."""
    model: ServedModel | None = None
    """None while it loads."""
    draining: bool = False
    """Set at SIGTERM, by ``start_draining``: no new requests."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""
    metrics: Metrics = field(init=False)
    text_pool: TextPool = field(init=False)
    operations: Operations = field(init=False)
    _wishes: WatchedState = field(init=False)
    body_timeouts: set[asyncio.Timeout] = field(default_factory=set)
    """Of the requests whose bodies are not whole yet."""

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.client, self.served_names[0], self.shared_metrics)
        self.text_pool = TextPool()
        self._wishes = WatchedState(self.client.run_directory)
        self.operations = Operations(self.client, self.restart_engine, timeout=self.operation_timeout, bound=self.bound)

    def start_draining(self) -> None:
        """Take no new requests, those whose bodies are not whole included. Twice is harmless."""
        self.draining = True
        for timeout in self.body_timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())

    async def catch_up(self) -> None:
        """Wait, though not for long, where another API server has just said that all replicas sleep, pause or are
        awake, and this one has yet to hear it of them.
        """
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while self._wishes.changed_within(1.0) and self._is_behind() and time.monotonic() < deadline:
            await asyncio.sleep(CATCH_UP_SECONDS / 20)

    def _is_behind(self) -> bool:
        wished = self._wishes.read()
        asleep = bool(wished.asleep)
        up = [link.stats for link in self.client.links if link.state in (EngineState.READY, EngineState.ASLEEP)]
        return any((bool(one.asleep), one.paused) != (asleep, asleep or wished.paused) for one in up)

    def unready_reason(self) -> str | None:
        """Why no request is taken now; None: they are."""
        if self.draining:
            return "the server is shutting down"
        if self.model is None:
            return "the model is loading"
        links = self.client.links
        if any(link.state is EngineState.READY for link in links):
            return None
        return "no engine is ready: " + ", ".join(f"engine {link.rank} is {link.condition}" for link in links)

    def serving(self) -> ServedModel:
        """The model. Raises RequestError with status 503 when no request is taken now."""
        reason = self.unready_reason()
        if reason is not None or self.model is None:
            raise RequestError(f"{reason}; try again later", status=503)
        return self.model

    def context_limit(self) -> int:
        """Prompt and output tokens of one request. Raises RequestError with status 503 when no engine is ready."""
        limit = self.client.max_model_len
        if limit is None:
            raise RequestError("no engine is ready; try again later", status=503)
        return limit

    @property
    def adapters(self) -> Sequence[WishedAdapter]:
        """LoRA adapters that requests may name as their model."""
        return self._wishes.read().adapters

    @property
    def at_rest(self) -> bool:
        """Whether operators let the engines sleep or pause, so that no request gets on until they wish otherwise."""
        return self.client.asleep or self._wishes.read().paused

    def find_adapter(self, name: str) -> WishedAdapter | None:
        """The LoRA adapter of a name; None: it is the model's own. Raises RequestError with status 404 for others."""
        if name in self.served_names:
            return None
        adapters = self.adapters
        for adapter in adapters:
            if adapter.name == name:
                return adapter
        served = [*self.served_names, *(adapter.name for adapter in adapters)]
        raise RequestError(
            f"no model called {name!r}; served: {', '.join(served)}",
            parameter="model",
            code="model_not_found",
            status=404,
        )

    def close(self) -> None:
        """End the threads; the client is its owner's to close. Twice is harmless."""
        self.text_pool.close()
