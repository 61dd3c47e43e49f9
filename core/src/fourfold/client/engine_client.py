"""An API server's connection to all engines: sends requests, hands out outputs, keeps loads. Knows no HTTP and no text.

A request outlives its engine: another one goes on from the prompt and the tokens that have come, and whoever asked sees
nothing of it. All methods belong to the event loop of ``start``; other threads go through ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fourfold.addresses import api_address, coordinator_address
from fourfold.client.engine_link import LINGER_MILLISECONDS, EngineLink
from fourfold.client.in_flight import InFlight, Receiver
from fourfold.client.load_table import LoadTable
from fourfold.client.request_stream import RequestStream
from fourfold.client.utility_calls import UtilityCalls
from fourfold.contracts.load_balancer import EngineLoads, EngineState, LoadBalancer
from fourfold.engine.operations import Call
from fourfold.engine.prefix_cache import read_marks
from fourfold.errors import EngineError, RequestError
from fourfold.messages import (
    AbortRequests,
    AddRequest,
    ApiServerInput,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineStats,
    JoinReports,
    LoadReports,
    RequestOutput,
    UtilityReply,
)
from fourfold.process_messages import EngineDead, EngineDraining, EngineNotice, EngineStarting

MESSAGES_AT_ONCE = 256
"""Read before other tasks of the loop get their turn."""
JOIN_MILLISECONDS = 60_000
"""How long the word to the coordinator may wait for it to start."""

logger = logging.getLogger(__name__)


class EngineClient:
    """Sends each request to the engine that the balancer chooses, and its outputs to whoever asked."""

    def __init__(
        self,
        run_directory: Path,
        api_index: int,
        num_engines: int,
        balancer: LoadBalancer,
        *,
        block_size: int = 16,
        utility_timeout: float = 60.0,
        coordinated: bool = False,
        first_rank: int = 0,
    ) -> None:
        """``coordinated``: a coordinator tells how engines stand of which nothing is heard directly.

        ``first_rank`` is the rank of the first engine's replica.
        """
        self.api_index = api_index
        self.first_rank = first_rank
        self.run_directory = run_directory
        self._address = api_address(run_directory, api_index)
        self._balancer = balancer
        self._block_size = block_size
        self._utility_timeout = utility_timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._table = LoadTable(num_engines, api_index, first_rank=first_rank)
        self._links = [
            EngineLink(self._context, run_directory, engine, self._table, first_rank=first_rank)
            for engine in range(num_engines)
        ]
        self._coordinator = coordinator_address(run_directory) if coordinated else None
        self._decoder = msgspec.msgpack.Decoder(ApiServerInput)
        self._requests: dict[str, InFlight] = {}
        self._utilities = UtilityCalls(api_index, self._links)
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def start(self) -> None:
        """Listen to the engines; must come before their first message is waited for."""
        self._loop = asyncio.get_running_loop()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(self._address)
        self._loop.add_reader(self._socket.fileno(), self._read)
        if self._coordinator is not None:
            with self._context.socket(zmq.PUSH) as joining:
                joining.setsockopt(zmq.LINGER, JOIN_MILLISECONDS)
                joining.connect(self._coordinator)
                joining.send(msgspec.msgpack.encode(JoinReports(client=self.api_index)))
        # The descriptor only tells of changes: what came before it was watched is read now.
        self._loop.call_soon(self._read)

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: AddRequest) -> RequestStream:
        """Send a request; iterate over the result for its outputs, or close it to abort. Raises like ``open``."""
        stream = RequestStream(request.request_id, self.abort)
        self.open(request, stream.receive)
        return stream

    def open(self, request: AddRequest, receiver: Receiver, *, engine: int | None = None) -> None:
        """Send a request; ``receiver`` is called with each output until one has a finish reason.

        ``engine`` is the one to begin on, the balancer's choice by default. When nobody can go on with it, the last
        output has finish reason ERROR. Raises RequestError with status 503 when no engine takes requests now.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use")
        in_flight = InFlight(request, receiver)
        self._place(in_flight, engine)
        self._requests[request.request_id] = in_flight

    def _place(self, in_flight: InFlight, engine: int | None = None) -> None:
        if engine is None:
            engine = self._balancer.choose(in_flight.balanced(self._block_size), self.loads)
            if self._links[engine].state is not EngineState.READY:
                state = self._links[engine].state
                raise EngineError(f"the load balancer chose engine {engine}, which is {state}; use another one")
        link = self._links[engine]
        if link.state is not EngineState.READY:
            raise RequestError(f"engine {link.rank} is {link.state}; try again later", status=503)
        in_flight.place(link)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now: their receivers hear no more. Ids that are unknown or ended are ignored."""
        ended: dict[int, list[str]] = {}
        for request_id in request_ids:
            in_flight = self._requests.pop(request_id, None)
            if in_flight is not None and in_flight.link is not None:
                ended.setdefault(in_flight.link.engine, []).append(request_id)
                in_flight.leave()
        for engine, ids in ended.items():
            try:
                self._links[engine].send(AbortRequests(request_ids=ids))
            except RequestError as error:
                logger.warning("abort of %d requests is lost: %s", len(ids), error)

    def fail_all(self, reason: str) -> None:
        """End every request with an error that its client sees, as when a drain runs out of time."""
        requests = dict(self._requests)
        self.abort(list(requests))
        for in_flight in requests.values():
            in_flight.fail(reason)

    async def call_all(
        self, calls: Sequence[Call], *, timeout: float, engines: Mapping[int, int] | None = None
    ) -> None:
        """See ``UtilityCalls.call_all``."""
        await self._utilities.call_all(calls, timeout=timeout, engines=engines)

    def engines_up(self) -> dict[int, int]:
        """See ``UtilityCalls.engines_up``."""
        return self._utilities.engines_up()

    def engines_missed(self, engines: Mapping[int, int]) -> list[int]:
        """See ``UtilityCalls.engines_missed``."""
        return self._utilities.engines_missed(engines)

    async def call_utility(self, engine: int, method: str, **arguments: Any) -> Any:
        """See ``UtilityCalls.call``; with this client's timeout."""
        return await self._utilities.call(engine, method, arguments, timeout=self._utility_timeout)

    # --- engines -----------------------------------------------------------------------------------------------

    @property
    def engine_states(self) -> list[EngineState]:
        """One an engine."""
        return [link.state for link in self._links]

    @property
    def asleep(self) -> bool:
        """Whether operators let the engines sleep, so that no request gets on until they wake them."""
        states = self.engine_states
        return EngineState.ASLEEP in states and not {EngineState.READY, EngineState.DRAINING} & set(states)

    @property
    def links(self) -> list[EngineLink]:
        """One an engine, to look at."""
        return self._links

    @property
    def ranks(self) -> range:
        """The replicas, by their ranks."""
        return range(self.first_rank, self.first_rank + len(self._links))

    @property
    def loads(self) -> EngineLoads:
        """What the balancer sees."""
        return self._table.loads

    @property
    def num_requests(self) -> int:
        """Requests of this API server that have not ended."""
        return len(self._requests)

    @property
    def max_model_len(self) -> int | None:
        """Prompt and output tokens that every ready engine takes; None while none is ready."""
        return min((link.ready.max_model_len for link in self._links if link.ready is not None), default=None)

    def stalled(self, timeout: float) -> str | None:
        """Which engine has had requests but finished no step for ``timeout`` seconds; None: none."""
        now = time.monotonic()
        for link in self._links:
            idle = now - link.last_progress
            if link.num_requests and link.state is EngineState.READY and not link.stats.paused and idle > timeout:
                return f"engine {link.rank} has {link.num_requests} requests and finished no step for {idle:.1f} s"
        return None

    def hear(self, notice: EngineNotice) -> None:
        """What the supervisor says of an engine."""
        match notice:
            case EngineStarting():
                self.set_incarnation(notice.engine, notice.incarnation)
            case EngineReady():
                self.mark_ready(notice)
            case EngineDraining():
                link = self._links[notice.engine]
                if notice.incarnation == link.incarnation and link.state in (EngineState.READY, EngineState.ASLEEP):
                    link.state = EngineState.DRAINING
            case EngineDead():
                link = self._links[notice.engine]
                if notice.incarnation == link.incarnation and link.state is not EngineState.DEAD:
                    if link.state is EngineState.STARTING and not notice.planned:
                        link.failure = notice.reason
                    self.mark_dead(notice.engine, notice.reason, blameless=notice.blameless)

    def set_incarnation(self, engine: int, incarnation: int) -> None:
        """Expect this incarnation; requests of another have to leave it, messages of another are dropped."""
        link = self._links[engine]
        if link.incarnation == incarnation:
            return
        if link.incarnation is not None and link.state is not EngineState.DEAD:
            self.mark_dead(engine, f"replaced by incarnation {incarnation}")
        link.reset(incarnation)
        self._balancer.learn_prefixes(engine, read_marks(b""))

    def mark_ready(self, ready: EngineReady) -> None:
        """Let an engine have requests; a notice of an older incarnation than the present one is ignored."""
        link = self._links[ready.engine]
        if link.incarnation is not None and ready.incarnation < link.incarnation:
            return
        if ready.incarnation == link.incarnation and link.state is not EngineState.STARTING:
            return
        self.set_incarnation(ready.engine, ready.incarnation)
        link.ready, link.failure = ready, ""
        link.state = link.awake_state
        self._place_homeless()

    def mark_dead(self, engine: int, reason: str, *, blameless: bool = False) -> None:
        """Let an engine's requests go on on others, from where they are; end its calls with an error.

        Where there is no other engine at all, or where one died with it before, a request ends with an error too.
        ``blameless``: none of its requests was the cause.
        """
        link = self._links[engine]
        link.state, link.reason, link.ready = EngineState.DEAD, reason, None
        link.close()
        self._utilities.mourn(engine, reason)
        homeless = [one for one in self._requests.values() if one.link is link]
        message = f"engine {link.rank} failed: {reason}"
        if len(self._links) == 1:
            self._fail(homeless, message)
            return
        suspects = [one for one in homeless if not one.bury(engine, blameless=blameless)]
        self._fail(suspects, f"{message}; another engine died with this request before, so it is not tried again")
        self._place_again([one for one in homeless if one not in suspects])
        if homeless:
            logger.warning("%s; %d of its requests go on elsewhere", message, len(homeless) - len(suspects))

    def _place_homeless(self) -> None:
        self._place_again([one for one in self._requests.values() if one.link is None])

    def _place_again(self, homeless: list[InFlight]) -> None:
        """Find another engine for each; without a ready one they wait for the next that gets ready."""
        for in_flight in homeless:
            if EngineState.READY not in self.engine_states:
                return
            if in_flight.request.request_id not in self._requests:  # aborted by the receiver of another
                continue
            try:
                self._place(in_flight)
            except RequestError as error:
                self._fail([in_flight], str(error))

    def _fail(self, requests: list[InFlight], reason: str) -> None:
        """End requests with an error that their clients see."""
        for in_flight in requests:
            in_flight.leave()
            self._requests.pop(in_flight.request.request_id, None)
        for in_flight in requests:  # receivers may call back
            in_flight.fail(reason)

    def report(self, engine: int, incarnation: int, stats: EngineStats) -> None:
        """Take an engine's report, whichever way it came; ignore that of another incarnation and one that is older."""
        link = self._links[engine]
        before = link.state
        if incarnation != link.incarnation or before is EngineState.DEAD or not link.report(stats):
            return
        if before is EngineState.ASLEEP and link.state is EngineState.READY:
            self._place_homeless()
        if stats.prefix_marks is not None:
            self._balancer.learn_prefixes(engine, read_marks(stats.prefix_marks))

    def close(self) -> None:
        """Close all sockets; requests still in flight end with an error. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.fail_all("the server is shutting down")
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)
        for link in self._links:
            link.close(linger=LINGER_MILLISECONDS)
        self._context.term()

    # --- messages ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._socket is None or self._closed or self._loop is None:
            return
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frame)
        self._loop.call_soon(self._read)

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            logger.error("dropped a message that is none of an engine's: %s", error)
            return
        if isinstance(message, LoadReports):
            for report in message.reports:
                self.report(report.engine, report.incarnation, report.stats)
            return
        if not 0 <= message.engine < len(self._links):
            logger.error("dropped a message of engine %d; there are %d", message.engine, len(self._links))
            return
        if isinstance(message, EngineReady):
            self.mark_ready(message)
            return
        link = self._links[message.engine]
        if message.incarnation != link.incarnation or link.state is EngineState.DEAD:
            logger.debug("dropped a message of incarnation %d of engine %d", message.incarnation, message.engine)
            return
        match message:
            case EngineOutputs():
                for output in message.outputs:
                    self._hand_out(output)
                self.report(message.engine, message.incarnation, message.stats)
            case EngineFailed():
                self.mark_dead(message.engine, message.message)
            case UtilityReply():
                self._utilities.answer(message)

    def _hand_out(self, output: RequestOutput) -> None:
        in_flight = self._requests.get(output.request_id)
        if in_flight is None:
            return
        in_flight.take(output.token_ids)
        if output.finish_reason is not None:
            in_flight.leave()
            del self._requests[output.request_id]
        if not in_flight.deliver(output):
            self.abort([output.request_id])
