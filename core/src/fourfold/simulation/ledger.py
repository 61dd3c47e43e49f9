"""What is known of a simulated load: each request's fate, and at any moment what each engine has to do, and for whom.

Kept in flat arrays that are written one element at a time and read as numpy columns.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.simulation.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standing:
    """All engines at one moment; ``shares`` have a row an API server, all else one element an engine."""

    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    held_tokens: NDArray[np.int64]
    """Of the KV cache."""
    request_shares: NDArray[np.int64]
    token_shares: NDArray[np.int64]


class Ledger:
    """Written by engines and by whoever sends them requests."""

    def __init__(self, workload: Workload, servers: NDArray[np.int64], num_engines: int) -> None:
        """``servers``: of each request the API server that it comes to."""
        self.num_engines = num_engines
        self.num_servers = int(servers.max()) + 1
        self.prompt_tokens: list[int] = workload.prompt_tokens.tolist()
        self.output_tokens: list[int] = workload.output_tokens.tolist()
        self.conversation: list[int] = workload.conversation.tolist()
        self.server: list[int] = servers.tolist()
        count = len(workload)
        self.engine, self.hit_tokens = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        self.admitted, self.first, self.finished = (array("d", bytes(8 * count)) for _ in range(3))
        self._running, self._waiting, self._held, self._steps, self._run_length = (
            array("q", bytes(8 * num_engines)) for _ in range(5)
        )
        self._run_start, self._step_seconds = (array("d", [1.0] * num_engines) for _ in range(2))
        shares = num_engines * self.num_servers
        self._requests, self._to_start, self._decoding, self._last_steps = (
            array("q", bytes(8 * shares)) for _ in range(4)
        )
        """A row an API server. Tokens to come of decoding requests are the sum of their last steps, less the present
        step for each: so a step changes nothing here.
        """

    def send(self, request: int, engine: int) -> None:
        """A request goes to ``engine``."""
        self.engine[request] = engine
        share = self.server[request] * self.num_engines + engine
        self._requests[share] += 1
        self._to_start[share] += self.prompt_tokens[request] + self.output_tokens[request]
        self._waiting[engine] += 1

    def admit(self, engine: int, request: int, now: float, hit_tokens: int, held_tokens: int) -> None:
        """It is in the batch; ``hit_tokens`` of its prompt need not be computed."""
        self.admitted[request] = now
        self.hit_tokens[request] = hit_tokens
        self._to_start[self.server[request] * self.num_engines + engine] -= hit_tokens
        self._waiting[engine] -= 1
        self._running[engine] += 1
        self._held[engine] = held_tokens

    def first_token(self, engine: int, request: int, now: float, last_step: int) -> None:
        """Its prompt is done; ``last_step`` of the engine will bring its last token."""
        self.first[request] = now
        share = self.server[request] * self.num_engines + engine
        left = self.prompt_tokens[request] - self.hit_tokens[request] + self.output_tokens[request]
        self._to_start[share] -= left
        self._decoding[share] += 1
        self._last_steps[share] += last_step

    def finish(self, engine: int, request: int, now: float, last_step: int, held_tokens: int) -> None:
        """It had its last token."""
        self.finished[request] = now
        share = self.server[request] * self.num_engines + engine
        self._requests[share] -= 1
        self._decoding[share] -= 1
        self._last_steps[share] -= last_step
        self._running[engine] -= 1
        self._held[engine] = held_tokens

    def run(self, engine: int, steps: int, start: float, step_seconds: float, length: int) -> None:
        """After ``steps`` steps, ``length`` more are under way since ``start``."""
        self._steps[engine] = steps
        self._run_start[engine] = start
        self._step_seconds[engine] = step_seconds
        self._run_length[engine] = length

    def standing(self, now: float) -> Standing:
        """All engines as they are."""
        shape = (self.num_servers, self.num_engines)
        under_way = np.floor((now - _column(self._run_start)) / _column(self._step_seconds)).astype(np.int64)
        steps = _column(self._steps) + np.minimum(under_way, _column(self._run_length))
        decode = _column(self._last_steps).reshape(shape) - _column(self._decoding).reshape(shape) * steps
        return Standing(
            running=_column(self._running).copy(),
            waiting=_column(self._waiting).copy(),
            held_tokens=_column(self._held).copy(),
            request_shares=_column(self._requests).reshape(shape).copy(),
            token_shares=_column(self._to_start).reshape(shape) + decode,
        )


def _column(values: array[int] | array[float]) -> NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64 if values.typecode == "q" else np.float64)
