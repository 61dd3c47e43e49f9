"""One engine as an API server sees it: its socket, its state and its load. Knows no request's content."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

import msgspec
import zmq

from fourfold.contracts.load_balancer import EngineLoad
from fourfold.errors import RequestError
from fourfold.messages import EngineInput, EngineReady, EngineStats

MAX_UNSENT_MESSAGES = 65536
"""Messages that may wait for an engine which does not read; one more refuses its request."""
LINGER_MILLISECONDS = 100
"""How long the last aborts may take to leave when everything closes."""


class EngineState(StrEnum):
    """Whether an engine may get requests."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineLink:
    """The way to one engine. A new incarnation gets a new socket, so that nothing meant for the old one reaches it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_directory: Path, engine: int) -> None:
        self.engine = engine
        self.state = EngineState.STARTING
        self.incarnation: int | None = None
        """None until the first one is known; messages of others are dropped."""
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.reason = ""
        """Why it is dead."""
        self.num_requests = 0
        """Requests of this API server that have not ended."""
        self.num_tokens = 0
        """Prompt tokens not yet computed and output tokens not yet received of these requests."""
        self.last_progress = time.monotonic()
        """When a step was last heard of, or waited for anew."""
        self._foreign_requests = 0
        self._foreign_tokens = 0
        self._context = context
        self._address = f"ipc://{run_directory}/engine-{engine}"
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] | None = None

    def reset(self, incarnation: int) -> None:
        """Forget the old incarnation and wait for this one."""
        self.close()
        self.incarnation = incarnation
        self.state = EngineState.STARTING
        self.ready = None
        self.stats = EngineStats()
        self.reason = ""
        self._foreign_requests = self._foreign_tokens = 0

    def send(self, message: EngineInput) -> None:
        """Queue a message; raises RequestError with status 503 if the engine reads none."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.set_hwm(MAX_UNSENT_MESSAGES)
            self._socket.connect(self._address)
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise RequestError(f"engine {self.engine} takes no messages; try again later", status=503) from error

    def close(self, *, linger: int = 0) -> None:
        """Close the socket; twice is harmless. ``linger``: milliseconds that queued messages may take to leave."""
        if self._socket is not None:
            self._socket.close(linger)
            self._socket = None

    def begin(self, num_tokens: int) -> None:
        """Count a request that was sent."""
        if self.num_requests == 0:
            self.last_progress = time.monotonic()
        self.num_requests += 1
        self.num_tokens += num_tokens

    def progress(self, num_tokens: int) -> None:
        """Count tokens that a request needs no more."""
        self.num_tokens -= num_tokens

    def end(self, num_tokens: int) -> None:
        """Count a request that ended with this many tokens still expected."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens

    def report(self, stats: EngineStats) -> None:
        """Take the engine's own report; what exceeds this API server's requests is other servers' load."""
        if stats.num_steps != self.stats.num_steps:
            self.last_progress = time.monotonic()
        self.stats = stats
        self._foreign_requests = max(0, stats.num_running + stats.num_waiting - self.num_requests)
        self._foreign_tokens = max(0, stats.num_queued_tokens - self.num_tokens)

    @property
    def load(self) -> EngineLoad:
        """The last report, corrected by what was sent and received since."""
        total = self.num_requests + self._foreign_requests
        num_running = min(self.stats.num_running, total)
        return EngineLoad(
            engine=self.engine,
            ready=self.state is EngineState.READY,
            num_running=num_running,
            num_waiting=total - num_running,
            num_queued_tokens=self.num_tokens + self._foreign_tokens,
            kv_cache_usage=self.stats.kv_cache_usage,
        )
