"""An engine without a model: speaks the real wire from a thread and answers what a test's script says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from fourfold.addresses import api_address, engine_address
from fourfold.engine.operations import OPERATIONS, Call
from fourfold.messages import (
    AbortRequests,
    AddRequest,
    CallUtility,
    EngineFailed,
    EngineInput,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    EngineStats,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
    UtilityReply,
)
from fourfold.sleep_tags import TAGS
from fourfold.testing.ready_engine import ready_engine

Script = Callable[[AddRequest], Iterable[int]]
IDLE_SECONDS = 0.02
"""How often an idle engine looks whether it should end."""


@dataclass(slots=True)
class _Running:
    request: AddRequest
    tokens: Iterator[int]
    output: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Still to compute."""
        prompt = 0 if self.output else len(self.request.prompt_token_ids)
        return prompt + (self.request.sampling.max_tokens or 0) - len(self.output)


class FakeEngine:
    """Each step brings every running request one token of ``script(request)``.

    Counts, stop tokens, eos, lengths and aborts are obeyed as by a real engine; log probabilities are made up:
    the token -0.5, the k-th runner-up -1.0 - k. Use as a context manager.
    """

    def __init__(
        self,
        run_directory: Path,
        script: Script,
        *,
        engine: int = 0,
        incarnation: int = 1,
        num_clients: int = 1,
        step_seconds: float = 0.002,
        max_num_seqs: int = 64,
        max_num_waiting: int = 64,
        max_model_len: int = 256,
    ) -> None:
        self._run_directory = run_directory
        self._script = script
        self._engine = engine
        self._incarnation = incarnation
        self._num_clients = num_clients
        self._step_seconds = step_seconds
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._max_model_len = max_model_len
        self._stopping = threading.Event()
        self._paused = threading.Event()
        self._last_words = ""
        self._encoder = msgspec.msgpack.Encoder()
        self._stats = EngineStats()
        self._layers: list[dict[str, Any]] = []
        self._requests: dict[str, _Running] = {}
        self.added: list[AddRequest] = []
        """Every request that came."""
        self.aborted: list[str] = []
        """Every id that was aborted."""
        self.operations: list[Call] = []
        """Every operation that was called for."""
        self.refusals: dict[str, str] = {}
        """Operations that are refused, and with which error."""
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def num_requests(self) -> int:
        """Requests running or waiting now."""
        return len(self._requests)

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._stats.num_steps

    def pause(self) -> None:
        """Finish no more steps, as a stuck device would; messages are still read."""
        self._paused.set()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._paused.clear()

    def stop(self, last_words: str = "") -> None:
        """End the thread; with ``last_words`` the engine says why it failed."""
        self._last_words = last_words
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
            inbox.bind(engine_address(self._run_directory, self._engine, self._incarnation))
            outboxes = [context.socket(zmq.PUSH) for _ in range(self._num_clients)]
            for client, outbox in enumerate(outboxes):
                outbox.connect(api_address(self._run_directory, client))
            self._outboxes = outboxes
            self._loop(inbox)
            for outbox in outboxes:
                outbox.close(1000 if self._last_words else 0)

    def _loop(self, inbox: zmq.Socket[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(EngineInput)
        for client in range(self._num_clients):
            self._send(client, self._ready())
        while not self._stopping.is_set():
            busy = bool(self._requests) and not self._paused.is_set()
            if inbox.poll(int(1000 * (self._step_seconds if busy else IDLE_SECONDS))):
                while inbox.poll(0):
                    self._take(decoder.decode(inbox.recv()))
            if busy:
                self._step()
        if self._last_words:
            for client in range(self._num_clients):
                self._send(
                    client,
                    EngineFailed(engine=self._engine, incarnation=self._incarnation, message=self._last_words),
                )

    def _take(self, message: EngineInput) -> None:
        match message:
            case AddRequest():
                self.added.append(message)
                if len(self._requests) >= self._max_num_seqs + self._max_num_waiting and not message.attempt:
                    self._publish(message.client, [_refusal(message.request_id)])
                else:
                    self._requests[message.request_id] = self._begin(message)
            case AbortRequests():
                self.aborted += message.request_ids
                for request_id in message.request_ids:
                    self._stats.requests_finished += self._requests.pop(request_id, None) is not None
                for client in range(self._num_clients):
                    self._publish(client, [])
            case CallUtility():
                reply = self._answer(message)
                self._publish(message.client, [])
                self._send(message.client, reply)

    def _begin(self, request: AddRequest) -> _Running:
        """From the start, or from where another engine stopped."""
        done = len(request.output_token_ids)
        tokens = itertools.islice(iter(self._script(request)), done, None)
        return _Running(request, tokens, list(request.output_token_ids))

    def _step(self) -> None:
        outputs: dict[int, list[RequestOutput]] = {client: [] for client in range(self._num_clients)}
        for running in list(self._requests.values())[: self._max_num_seqs]:
            output = self._advance(running)
            outputs[running.request.client].append(output)
            if output.finish_reason is not None:
                del self._requests[running.request.request_id]
                self._stats.requests_finished += 1
        self._stats.num_steps += 1
        for client, of_client in outputs.items():
            self._publish(client, of_client)

    def _advance(self, running: _Running) -> RequestOutput:
        request, sampling = running.request, running.request.sampling
        first = not running.output
        token_id = next(running.tokens)
        running.output.append(token_id)
        output = RequestOutput(request_id=request.request_id, token_ids=[token_id])
        if first:
            self._stats.prompt_tokens += len(request.prompt_token_ids)
            if sampling.prompt_logprobs is not None:
                scored = [_logprobs(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]]
                output.prompt_logprobs = [None, *scored]
        if sampling.logprobs is not None:
            output.logprobs = [_logprobs(token_id, sampling.logprobs)]
        self._stats.generation_tokens += 1
        allowed = len(running.output) >= sampling.min_tokens
        if allowed and token_id in request.eos_token_ids and not sampling.ignore_eos:
            output.finish_reason = FinishReason.STOP
        elif allowed and token_id in sampling.stop_token_ids:
            output.finish_reason, output.stop_token_id = FinishReason.STOP, token_id
        elif len(running.output) >= (sampling.max_tokens or self._max_model_len):
            output.finish_reason = FinishReason.LENGTH
        return output

    def _publish(self, client: int, outputs: list[RequestOutput]) -> None:
        self._stats.num_running = min(len(self._requests), self._max_num_seqs)
        self._stats.num_waiting = len(self._requests) - self._stats.num_running
        self._stats.kv_cache_usage = self._stats.num_running / self._max_num_seqs
        shares = dict.fromkeys(range(self._num_clients), (0, 0))
        for running in self._requests.values():
            requests, tokens = shares[running.request.client]
            shares[running.request.client] = requests + 1, tokens + running.num_tokens
        self._stats.shares = shares
        self._stats.num_queued_tokens = sum(tokens for _, tokens in shares.values())
        self._send(
            client,
            EngineOutputs(engine=self._engine, incarnation=self._incarnation, outputs=outputs, stats=self._stats),
        )

    def show_layers(self, counters: list[dict[str, float]], report: list[dict[str, Any]]) -> None:
        """Let the layers count and report something, from the next step on."""
        self._stats.layer_counters, self._layers = counters, report

    def _answer(self, call: CallUtility) -> UtilityReply:
        known = call.method == "echo" or call.method in OPERATIONS
        error = None if known else f"no method called {call.method!r}"
        if call.method in OPERATIONS:
            self.operations.append((call.method, call.arguments))
            error = self.refusals.get(call.method)
            if error is None and call.method in ("sleep", "wake_up"):
                self._stats.asleep = TAGS if call.method == "sleep" else ()
                self._stats.state_changes += 1
            if error is None and call.method in ("pause", "resume"):
                self._stats.paused = call.method == "pause"
                self._stats.state_changes += 1
        return UtilityReply(
            engine=self._engine,
            incarnation=self._incarnation,
            call_id=call.call_id,
            result=self._layers if call.method == "layer_report" else call.arguments if call.method == "echo" else None,
            error=error,
            error_status=400 if call.method in self.refusals else 500,
        )

    def _ready(self) -> EngineReady:
        return ready_engine(
            self._engine, incarnation=self._incarnation, max_model_len=self._max_model_len, device="none"
        )

    def _send(self, client: int, message: EngineMessage) -> None:
        self._outboxes[client].send(self._encoder.encode(message))


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    top = [(token_id, -0.5)] + [(token_id - k, -1.0 - k) for k in range(1, count)]
    return TokenLogprobs(token_id, -0.5, 1, top[:count])


def _refusal(request_id: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, finish_reason=FinishReason.ERROR, error="too many requests wait", error_status=429
    )
