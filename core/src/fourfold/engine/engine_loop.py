"""Feeds one engine core from sockets: takes inputs, steps, sends outputs. Knows neither models nor processes."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fourfold.addresses import api_address, coordinator_address, engine_address, wave_address
from fourfold.coordinator.waves import CoordinatorNotice, RankInput, WaveRank, WaveState
from fourfold.engine.operations import OPERATIONS
from fourfold.engine.peer import Peer
from fourfold.engine.served_core import ServedCore
from fourfold.errors import ConfigError, ExecutorFailed, FourfoldError, RequestError
from fourfold.messages import (
    AbortRequests,
    AddRequest,
    CallUtility,
    EngineInput,
    EngineOutputs,
    EngineReport,
    EngineStats,
    FinishReason,
    RequestOutput,
    UtilityReply,
)
from fourfold.process_messages import DrainEngine, EngineOrder
from fourfold.supervision.deployment_state import read_state

logger = logging.getLogger(__name__)

_MAX_INPUTS_PER_STEP = 1024
"""So that a flood of requests cannot keep running ones from stepping."""
_MAX_QUEUED_OUTPUTS = 4096
"""Messages waiting for one API server; some 40 s of steps of 10 ms."""
_STATS_INTERVAL = 0.25
"""Seconds after which an API server without outputs hears the stats of a working engine."""
_REPORT_INTERVAL = 0.05
"""The same for the coordinator, which publishes every 0.1 s."""
_REPEAT_INTERVAL = 2.0
"""The same without news, as it may be another coordinator than the one that was told."""
_MAX_QUEUED_REPORTS = 16
_MARKS_INTERVAL = 1.0
"""Seconds between descriptions of a working engine's prefix cache; balancers know themselves what they sent since."""
_RETRY_MILLISECONDS = 500
_LATECOMER_MILLISECONDS = 100
"""How long an engine that drains waits for requests that were sent before their senders knew."""


class EngineLoop:
    """Owns the engine's sockets. ``run`` returns after ``stop``, which any thread may call."""

    def __init__(
        self,
        core: ServedCore,
        *,
        run_directory: Path,
        engine: int,
        incarnation: int,
        num_api_servers: int,
        coordinated: bool = False,
        lockstep: bool = False,
    ) -> None:
        """``coordinated``: a coordinator hears how the engine stands, and tells API servers. ``lockstep``: it also says
        when engines that step together begin.
        """
        self._core = core
        self._engine = engine
        self._incarnation = incarnation
        self._run_directory = run_directory
        self._context = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.bind(engine_address(run_directory, engine, incarnation))
        self._clients = [
            Peer(self._context, api_address(run_directory, index), _MAX_QUEUED_OUTPUTS)
            for index in range(num_api_servers)
        ]
        self._coordinator = (
            Peer(self._context, coordinator_address(run_directory), _MAX_QUEUED_REPORTS) if coordinated else None
        )
        self._wave: WaveRank | None = None
        if lockstep:
            self._wave = WaveRank(engine, self._tell_coordinator, paused=core.stats.paused)
            self._wave_inputs = self._context.socket(zmq.PULL)
            self._wave_inputs.bind(wave_address(run_directory, engine))
        self._orders: deque[EngineOrder] = deque()
        self._pauses: list[CallUtility] = []
        """Calls that are answered when this engine, and all that step together with it, have come to a stop."""
        self._paused_for: int | None = None
        """The API server that heard last that this engine has come to a stop; None: it has gone on."""
        self._draining = False
        self._wake_lock = threading.Lock()
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._inputs, zmq.POLLIN)
        if self._wave is not None:
            self._poller.register(self._wave_inputs, zmq.POLLIN)
        self._poller.register(self._stop_event, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(EngineInput)
        self._marks = b""
        self._marks_time = 0.0
        self._stopping = False
        self._failure: Exception | None = None

    def run(self) -> None:
        """Serve until ``stop``, or until an ordered drain is over.

        Whatever the core raises in a step comes out, and what ``fail`` was told.
        """
        while True:
            self._take_orders()
            if self._stopping and (self._wave is None or not self._wave.steps):
                return  # in a wave, others would wait for this engine
            if self._failure is not None:
                raise self._failure
            self._take_inputs()
            if self._advance():
                continue
            self._publish_stats()
            if self._draining:
                if not self._poller.poll(_LATECOMER_MILLISECONDS):
                    return
            else:
                # Nothing to do until something arrives, but for a client that has yet to hear of its losses, and a
                # coordinator that may be another one than was told of the work.
                wants = self._core.has_work or bool(self._pauses)
                retries = wants or any(client.lost for client in self._clients)
                repeats = None if self._coordinator is None else int(1000 * _REPEAT_INTERVAL)
                arrived = self._poller.poll(_RETRY_MILLISECONDS if retries else repeats)
                if not arrived and self._wave is not None and wants:
                    self._wave.work_arrived(again=True)

    def _advance(self) -> bool:
        """Step, if that is due; whether it was."""
        core, wave = self._core, self._wave
        if wave is None:
            if core.has_work:
                self._send_step(core.step())
                return True
            self._confirm_pause()
            return False
        while self._wave_inputs.poll(0):
            wave.receive(msgspec.msgpack.decode(self._wave_inputs.recv(), type=RankInput))
        if wave.state is WaveState.PAUSED:
            self._confirm_pause()
        elif wave.state is WaveState.IDLE and core.has_work:
            wave.work_arrived()
        if not wave.steps:
            return False
        outputs, reduced = core.step_together(wave.vote(has_work=core.has_work))
        self._send_step(outputs)
        wave.step_done(reduced, has_work=core.has_work)
        return True

    def stop(self) -> None:
        """Let ``run`` return after the step that it is in."""
        self._stopping = True
        self._wake()

    def order(self, order: EngineOrder) -> None:
        """Have an order carried out between two steps. From any thread."""
        self._orders.append(order)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let ``run`` raise ``error`` even when nothing is to do. From any thread."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """Close the sockets; what was sent still leaves for up to a second."""
        self._context.destroy(linger=1000)
        with self._wake_lock:
            os.close(self._stop_event)
            self._stop_event = -1

    def _wake(self) -> None:
        with self._wake_lock:
            if self._stop_event >= 0:
                os.eventfd_write(self._stop_event, 1)

    def _take_orders(self) -> None:
        # First of all: whoever wakes the loop has said before what for.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._stop_event)
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, DrainEngine):
                self._draining = True
            else:
                # The order may have waited for a long step, and its successor have sent something by now.
                self._clients[order.client] = self._clients[order.client].renewed()
                self._take_inputs()  # what it sent before it died
                self._core.abort_client(order.client, order.died)
                self._forget_pauses(order.client, order.died)

    def _take_inputs(self) -> None:
        for _ in range(_MAX_INPUTS_PER_STEP):
            try:
                frame = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except (msgspec.MsgspecError, FourfoldError) as error:
                logger.error("dropped an input that cannot be read: %s", error)
                continue
            self._handle(message)

    def _handle(self, message: AddRequest | AbortRequests | CallUtility) -> None:
        if isinstance(message, AbortRequests):
            self._core.abort(message.request_ids)
        elif not 0 <= message.client < len(self._clients):
            logger.error("dropped an input of API server %d, which does not exist", message.client)
        elif isinstance(message, AddRequest):
            refusal = self._add(message)
            if refusal is not None:
                self._send_outputs(self._clients[message.client], [refusal])
        elif message.method == "pause":
            self._pause(message)
        elif message.method == "resume":
            self._resume(message)
        else:
            reply = self._call_utility(message)
            if OPERATIONS.get(message.method):
                self._tell_all_clients()
            self._clients[message.client].send(reply)

    def _tell_all_clients(self) -> None:
        """Before one of them says that something is done: any may get the next request."""
        for client in self._clients:
            self._send_outputs(client, [])

    def _pause(self, call: CallUtility) -> None:
        """Answered by ``_confirm_pause``."""
        try:
            self._send_step(self._core.pause(**call.arguments))
        except RequestError as error:
            self._clients[call.client].send(self._reply(call, None, str(error), error.status))
            return
        self._pauses.append(call)
        if self._wave is not None:
            # What an earlier pause has kept is to be finished now, on any of the engines; asleep none can step.
            self._wave.pause(again=call.arguments.get("mode") == "wait" and not self._core.stats.asleep)

    def _confirm_pause(self) -> None:
        if self._pauses:
            self._core.confirm_pause()
            self._paused_for = self._pauses[-1].client
            self._tell_all_clients()
            self._answer_pauses(None)

    def _answer_pauses(self, failure: str | None) -> None:
        for call in self._pauses:
            self._clients[call.client].send(self._reply(call, None, failure, 409))
        self._pauses.clear()

    def _resume(self, call: CallUtility | None) -> None:
        self._core.resume()
        self._paused_for = None
        if self._wave is not None and not self._core.stats.paused:
            self._wave.resume()
        self._answer_pauses("the engine went on before it had come to a stop")
        if call is not None:
            self._tell_all_clients()
            self._clients[call.client].send(self._reply(call))

    def _forget_pauses(self, client: int, died: float) -> None:
        """The API server is no more: a stop that it called for ends, unless it is noted as what operators wish."""
        left = [call for call in self._pauses if call.client != client or call.call_id > 1e9 * died]
        theirs = len(left) < len(self._pauses) or self._paused_for == client
        self._pauses = left
        if theirs and not left:
            wished = read_state(self._run_directory)
            if not (wished.paused or wished.asleep):
                self._resume(None)

    def _add(self, request: AddRequest) -> RequestOutput | None:
        try:
            return self._core.add(request)
        except Exception as error:  # one request must not end the others
            logger.exception("request %s cannot be added", request.request_id)
            return _failure(request.request_id, f"the engine cannot take this request: {error}")

    def _call_utility(self, call: CallUtility) -> UtilityReply:
        result: Any = None
        failure, status = None, 500
        if OPERATIONS.get(call.method):
            for outputs in self._core.settle():
                self._send_step(outputs)
        if call.method not in OPERATIONS:
            failure = f"no utility called {call.method!r}; there are: {', '.join(sorted(OPERATIONS))}"
        elif OPERATIONS[call.method] and self._wave is not None and self._wave.state is not WaveState.PAUSED:
            failure, status = f"{call.method} of engines that step together needs a pause first", 409
        else:
            try:
                result = getattr(self._core, call.method)(**call.arguments)
            except (ConfigError, RequestError) as error:
                failure, status = str(error), error.status if isinstance(error, RequestError) else 400
            except ExecutorFailed:  # the engine ends, of which the caller hears
                raise
            except Exception as error:  # the caller gets it
                logger.exception("utility %s failed", call.method)
                failure = f"{type(error).__name__}: {error}"
        return self._reply(call, result, failure, status)

    def _reply(
        self, call: CallUtility, result: Any = None, failure: str | None = None, status: int = 500
    ) -> UtilityReply:
        return UtilityReply(
            engine=self._engine,
            incarnation=self._incarnation,
            call_id=call.call_id,
            result=result,
            error=failure,
            error_status=status,
        )

    def _send_step(self, outputs: Mapping[int, list[RequestOutput]]) -> None:
        now = time.monotonic()
        for index, client in enumerate(self._clients):
            mine = outputs.get(index, [])
            due = self._coordinator is None and now - client.last_send > _STATS_INTERVAL
            if mine or client.lost or due:
                self._send_outputs(client, mine)
        if self._coordinator is not None and now - self._coordinator.last_send > _REPORT_INTERVAL:
            self._report(self._coordinator)

    def _publish_stats(self) -> None:
        """While there is nothing to do: tell who does not know how things stand."""
        if self._coordinator is not None:
            stale = [client for client in self._clients if client.lost]
            old = time.monotonic() - self._coordinator.last_send > _REPEAT_INTERVAL
            if old or self._coordinator.last_stats != self._core.stats:
                self._marks_time = 0.0  # nobody is delayed by it, and it may be a while until there is more to say
                self._report(self._coordinator)
        else:
            stale = [client for client in self._clients if client.lost or client.last_stats != self._core.stats]
            if stale:
                self._marks_time = 0.0
        for client in stale:
            self._send_outputs(client, [])

    def _send_outputs(self, client: Peer, outputs: list[RequestOutput]) -> None:
        """Send outputs and stats. Requests whose outputs find no room end, and the client hears of it later."""
        known = copy.copy(self._core.stats)
        stats = known if self._coordinator is not None else self._with_marks(known, client)
        lost = [_failure(name, "the API server was too slow to take the outputs") for name in client.lost]
        message = EngineOutputs(engine=self._engine, incarnation=self._incarnation, outputs=lost + outputs, stats=stats)
        if client.send(message):
            client.lost.clear()
            client.note(known, self._marks)
        elif outputs:
            client.lost.update(output.request_id for output in outputs)
            self._core.abort([output.request_id for output in outputs])

    def _tell_coordinator(self, notice: CoordinatorNotice) -> None:
        if self._coordinator is not None:
            self._coordinator.send(notice)

    def _report(self, coordinator: Peer) -> None:
        known = copy.copy(self._core.stats)
        stats = self._with_marks(known, coordinator)
        coordinator.send(EngineReport(engine=self._engine, incarnation=self._incarnation, stats=stats))
        coordinator.note(known, self._marks)  # one that takes nothing is being restarted, and hears it again

    def _with_marks(self, known: EngineStats, peer: Peer) -> EngineStats:
        """The stats for a peer, with what the prefix cache holds if it does not know."""
        now = time.monotonic()
        if now - self._marks_time > _MARKS_INTERVAL:
            self._marks, self._marks_time = self._core.prefix_marks(), now
        if peer.marks == self._marks:
            return known
        stats = copy.copy(known)
        stats.prefix_marks = self._marks
        return stats


def _failure(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=message)
