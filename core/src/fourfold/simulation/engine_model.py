"""One simulated engine: continuous batching under one token budget, a KV cache, and steps that take time by formula.

It is stepped exactly, but not one by one: between two events all steps of an engine are alike, so a run of them is one
event. An arrival cuts the run at the end of the step it falls in, as in an engine.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from fourfold.simulation.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """What an engine can do; the defaults are about a model of 8 billion weights on one large GPU."""

    step_seconds: float = 0.008
    """Of a step, however small."""
    prompt_token_seconds: float = 0.00005
    """More for each prompt token in it."""
    sequence_seconds: float = 0.0001
    """More for each sequence that it decodes."""
    max_num_seqs: int = 128
    """Requests in the batch at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of a step."""
    kv_cache_tokens: int = 400_000
    """Tokens that the KV cache holds, of running requests and of conversations that may go on."""
    block_size: int = 16
    """Tokens of a block; whole blocks are found in the prefix cache."""


class SimulatedEngine:
    """Takes requests by number and writes what becomes of them into the ledger."""

    __slots__ = (
        "_cached",
        "_cached_tokens",
        "_chunk",
        "_decoding",
        "_held_tokens",
        "_index",
        "_ledger",
        "_model",
        "_prefill_tokens",
        "_prefilling",
        "_run_length",
        "_run_start",
        "_step_seconds",
        "_steps",
        "_waiting",
        "busy_seconds",
        "ends",
        "talked",
        "version",
    )

    def __init__(self, index: int, model: EngineModel, ledger: Ledger) -> None:
        self._index = index
        self._model = model
        self._ledger = ledger
        self._waiting: deque[int] = deque()
        self._prefilling: deque[list[int]] = deque()
        """[request, prompt tokens left], the first is computed first."""
        self._prefill_tokens = 0
        self._decoding: list[tuple[int, int]] = []
        """A heap of (step after which it is done, request)."""
        self._held_tokens = 0
        self._cached: dict[int, int] = {}
        """Conversation -> tokens of it that are cached, the last used last."""
        self._cached_tokens = 0
        self._steps = 0
        self._run_start = self._step_seconds = 0.0
        self._run_length = self._chunk = 0
        self.ends = math.inf
        """When the present run of steps ends; infinite when idle."""
        self.version = 0
        """Changes when ``ends`` is brought forward."""
        self.busy_seconds = 0.0
        self.talked: dict[int, int] = {}
        """Conversations whose cached tokens have changed since somebody emptied this -> the new number."""

    def submit(self, request: int, now: float) -> bool:
        """Queue a request; whether ``ends`` has changed."""
        self._waiting.append(request)
        if self.ends == math.inf:
            self._admit(now)
            self._start(now)
            return True
        if self._prefilling or self._run_length == 1 or not self._fits(request):
            return False
        done = max(1, math.ceil((now - self._run_start) / self._step_seconds))
        if done >= self._run_length:
            return False
        self._run_length = done
        self.ends = self._run_start + done * self._step_seconds
        self.version += 1
        self._ledger.run(self._index, self._steps, self._run_start, self._step_seconds, done)
        return True

    def finish_run(self, now: float) -> None:
        """At ``ends``: take in what the steps brought, and go on."""
        self._steps += self._run_length
        self.busy_seconds += self._run_length * self._step_seconds
        budget = self._run_length * self._chunk
        self._prefill_tokens -= budget
        while budget:
            head = self._prefilling[0]
            if head[1] > budget:
                head[1] -= budget
                break
            budget -= head[1]
            self._prefilling.popleft()
            self._first_token(head[0], now)
        decoding = self._decoding
        while decoding and decoding[0][0] <= self._steps:
            self._finish(*heapq.heappop(decoding), now)
        if self._waiting:
            self._admit(now)
        self._start(now)

    def _start(self, now: float) -> None:
        """Begin a run of steps that are alike."""
        model, decoding = self._model, self._decoding
        length = decoding[0][0] - self._steps if decoding else 0
        chunk = 0
        if self._prefilling:
            chunk = min(self._prefill_tokens, max(1, model.max_num_batched_tokens - len(decoding)))
            whole = max(1, (self._prefilling[0][1] - 1) // chunk)
            length = min(whole, length) if length else whole
        if not length:
            self.ends = math.inf
            self._ledger.run(self._index, self._steps, now, 1.0, 0)
            return
        self._chunk, self._run_length, self._run_start = chunk, length, now
        self._step_seconds = (
            model.step_seconds + chunk * model.prompt_token_seconds + len(decoding) * model.sequence_seconds
        )
        self.ends = now + length * self._step_seconds
        self._ledger.run(self._index, self._steps, now, self._step_seconds, length)

    def _fits(self, request: int) -> bool:
        ledger, model = self._ledger, self._model
        if len(self._decoding) + len(self._prefilling) >= model.max_num_seqs:
            return False
        needed = ledger.prompt_tokens[request] + ledger.output_tokens[request]
        return self._held_tokens + needed <= model.kv_cache_tokens or self._held_tokens == 0

    def _admit(self, now: float) -> None:
        """Let requests join while the next step has budget for them."""
        ledger = self._ledger
        budget = self._model.max_num_batched_tokens - len(self._decoding)
        while self._waiting and self._prefill_tokens < budget and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            prompt, talk = ledger.prompt_tokens[request], ledger.conversation[request]
            hit = 0
            if talk in self._cached:
                tokens = self._cached.pop(talk)
                self._cached[talk] = tokens
                hit = min(tokens, prompt - 1) // self._model.block_size * self._model.block_size
            self._prefilling.append([request, prompt - hit])
            self._prefill_tokens += prompt - hit
            self._held_tokens += prompt + ledger.output_tokens[request]
            self._evict()
            ledger.admit(self._index, request, now, hit, self._held_tokens)

    def _first_token(self, request: int, now: float) -> None:
        last_step = self._steps + self._ledger.output_tokens[request] - 1
        self._ledger.first_token(self._index, request, now, last_step)
        heapq.heappush(self._decoding, (last_step, request))

    def _finish(self, last_step: int, request: int, now: float) -> None:
        ledger = self._ledger
        tokens = ledger.prompt_tokens[request] + ledger.output_tokens[request]
        self._held_tokens -= tokens
        talk = ledger.conversation[request]
        if talk >= 0:
            self._cached_tokens += tokens - self._cached.pop(talk, 0)
            self._cached[talk] = self.talked[talk] = tokens
            self._evict()
        ledger.finish(self._index, request, now, last_step, self._held_tokens)

    def _evict(self) -> None:
        while self._cached and self._held_tokens + self._cached_tokens > self._model.kv_cache_tokens:
            talk = next(iter(self._cached))
            self._cached_tokens -= self._cached.pop(talk)
            self.talked[talk] = 0
