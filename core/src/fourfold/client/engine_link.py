"""One engine as an API server sees it: its socket, its state and its progress. Knows no request's content."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import zmq

from fourfold.addresses import engine_address
from fourfold.client.load_table import LoadTable
from fourfold.contracts.load_balancer import EngineState
from fourfold.errors import RequestError
from fourfold.messages import EngineInput, EngineReady, EngineStats

MAX_UNSENT_MESSAGES = 65536
"""Messages that may wait for an engine which does not read; one more refuses its request."""
LINGER_MILLISECONDS = 100
"""How long the last aborts may take to leave when everything closes."""


class EngineLink:
    """The way to one engine. A new incarnation gets a new socket, so that nothing meant for the old one reaches it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_directory: Path,
        engine: int,
        table: LoadTable,
        *,
        first_rank: int = 0,
    ) -> None:
        self.engine = engine
        self.rank = first_rank + engine
        """Of its replica, counted over all nodes; ``engine`` counts those that this API server knows."""
        self.incarnation: int | None = None
        """None until the first one is known; messages of others are dropped."""
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.reason = ""
        """Why it is dead."""
        self.failure = ""
        """Why its last start failed; empty once it is ready."""
        self.last_progress = time.monotonic()
        """When a step was last heard of, or waited for anew."""
        self._table = table
        self._context = context
        self._run_directory = run_directory
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
        self._table.forget_report(self.engine)

    def send(self, message: EngineInput) -> None:
        """Queue a message; raises RequestError with status 503 if the engine reads none."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.set_hwm(MAX_UNSENT_MESSAGES)
            self._socket.connect(engine_address(self._run_directory, self.engine, self.incarnation or 0))
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise RequestError(f"engine {self.rank} takes no messages; try again later", status=503) from error

    def close(self, *, linger: int = 0) -> None:
        """Close the socket; twice is harmless. ``linger``: milliseconds that queued messages may take to leave."""
        if self._socket is not None:
            self._socket.close(linger)
            self._socket = None

    @property
    def state(self) -> EngineState:
        """Whether it may get requests."""
        return self._table.loads.states[self.engine]

    @state.setter
    def state(self, state: EngineState) -> None:
        self._table.set_state(self.engine, state)

    @property
    def condition(self) -> str:
        """The state in a word, which is ``failing`` for one whose last start failed, until it is ready."""
        return "failing" if self.failure else str(self.state)

    @property
    def awake_state(self) -> EngineState:
        """READY, unless it said that it sleeps."""
        return EngineState.ASLEEP if self.stats.asleep else EngineState.READY

    @property
    def num_requests(self) -> int:
        """Requests of this API server that have not ended."""
        return self._table.own_requests(self.engine)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens not yet computed and output tokens not yet received of these requests."""
        return self._table.own_tokens(self.engine)

    def begin(self, num_tokens: int) -> None:
        """Count a request that was sent."""
        if self.num_requests == 0:
            self.last_progress = time.monotonic()
        self._table.begin(self.engine, num_tokens)

    def progress(self, num_tokens: int) -> None:
        """Count tokens that a request needs no more."""
        self._table.progress(self.engine, num_tokens)

    def end(self, num_tokens: int) -> None:
        """Count a request that ended with this many tokens still expected."""
        self._table.end(self.engine, num_tokens)

    def report(self, stats: EngineStats) -> bool:
        """Take a report of this incarnation; False if a later one is known already."""
        if stats.version < self.stats.version:
            return False
        if stats.num_steps != self.stats.num_steps or stats.state_changes != self.stats.state_changes:
            self.last_progress = time.monotonic()
        self.stats = stats
        if self.state in (EngineState.READY, EngineState.ASLEEP):
            self.state = self.awake_state
        self._table.report(self.engine, stats)
        return True
