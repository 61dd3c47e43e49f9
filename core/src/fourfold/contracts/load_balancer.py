"""The load-balancer contract: which engine takes a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import RequestError


class EngineState(StrEnum):
    """Whether an engine may get requests: only a ready one does."""

    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    """Has no memory for requests at present, on an operator's wish."""
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineLoads:
    """All engines as one API server sees them: what it sent itself, by now, and what others did, by the last reports.

    Arrays have one element an engine and are read only. They change between two calls of a balancer, never during one.
    """

    states: Sequence[EngineState]
    ready: NDArray[np.bool_]
    """Which engines may get requests."""
    num_running: NDArray[np.int64]
    num_waiting: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Tokens still to do: of all requests the prompt tokens to compute and the output tokens to come, at most."""
    kv_cache_usage: NDArray[np.float64]
    """0 to 1, by the last report."""

    first_rank: int = 0
    """Of the replica of the first engine, over all nodes; for messages."""

    def __len__(self) -> int:
        return len(self.states)

    def ready_engines(self) -> NDArray[np.intp]:
        """Numbers of the engines that may get requests; RequestError with status 503 when there are none."""
        engines = self.ready.nonzero()[0]
        if len(engines) == 0:
            states = ", ".join(
                f"engine {engine} is {state}" for engine, state in enumerate(self.states[:8], self.first_rank)
            )
            more = f" and {len(self) - 8} more are not ready either" if len(self) > 8 else ""
            raise RequestError(f"no engine is ready: {states}{more}; try again later", status=503)
        return engines


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedRequest:
    """What a balancer may look at."""

    num_prompt_tokens: int
    max_tokens: int
    read_marks: Callable[[], NDArray[np.uint32]]
    """Computes a mark for each full block of the prompt, 512 at most: the k-th stands for the first k blocks and for
    the cache salt. Engines that hold them say so by ``learn_prefixes``. Costs about a microsecond a block.
    """


class LoadBalancer(Protocol):
    """Chooses an engine for each request. One thread calls it, and each API server has its own."""

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """The number of an engine that is ready. ``loads.ready_engines()`` has them, and refuses when there are none.

        Runs on the event loop before the request is sent: 50 microseconds at 64 engines at most.
        """

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """Hear which prefixes ``engine`` holds now, in place of what it said before; none when it starts anew.

        ``marks`` are some of those of ``BalancedRequest``, at most 1024, the last used ones last.
        """
