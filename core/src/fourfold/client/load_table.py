"""The loads of all engines as one API server sees them: what it knows of its own requests, and reports of the others'.

A report is old when it arrives. Of this server's requests it is therefore not believed: its part is taken out and what
is known here by now is put in its place, so that neither a request that was just sent nor one that has just ended is
forgotten, whichever way the report came.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.contracts.load_balancer import EngineLoads, EngineState
from fourfold.messages import EngineStats

Numbers = int | NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)


class LoadTable:
    """``loads`` is what balancers read; everything else here writes it. ``client`` is this API server's number."""

    def __init__(self, num_engines: int, client: int, *, first_rank: int = 0) -> None:
        self._client = client
        self._states = [EngineState.STARTING] * num_engines
        self._ready = np.zeros(num_engines, np.bool_)
        self._own_requests, self._own_tokens, self._other_requests, self._other_tokens = _columns(num_engines, 4)
        self._reported_running, self._num_running, self._num_waiting, self._num_tokens = _columns(num_engines, 4)
        self._kv_cache_usage = np.zeros(num_engines)
        self.loads = EngineLoads(
            states=self._states,
            ready=_read_only(self._ready),
            num_running=_read_only(self._num_running),
            num_waiting=_read_only(self._num_waiting),
            num_tokens=_read_only(self._num_tokens),
            kv_cache_usage=_read_only(self._kv_cache_usage),
            first_rank=first_rank,
        )

    def set_state(self, engine: int, state: EngineState) -> None:
        """Only a ready engine gets requests."""
        self._states[engine] = state
        self._ready[engine] = state is EngineState.READY

    def own_requests(self, engine: int) -> int:
        """Requests of this server that ``engine`` has."""
        return int(self._own_requests[engine])

    def own_tokens(self, engine: int) -> int:
        """What they still need."""
        return int(self._own_tokens[engine])

    def begin(self, engine: int, num_tokens: int) -> None:
        """A request of this server was sent that needs ``num_tokens``."""
        self._own_requests[engine] += 1
        self._own_tokens[engine] += num_tokens
        self._num_tokens[engine] += num_tokens
        self._count_requests(engine)

    def progress(self, engine: int, num_tokens: int) -> None:
        """It needs ``num_tokens`` fewer."""
        self._own_tokens[engine] -= num_tokens
        self._num_tokens[engine] -= num_tokens

    def end(self, at: int | slice, num_tokens: Numbers, *, count: Numbers = 1) -> None:
        """It ended, and would have needed ``num_tokens`` more. Or ``count`` of them did, of one engine or of many."""
        self._own_requests[at] -= count
        self._own_tokens[at] -= num_tokens
        self._num_tokens[at] -= num_tokens
        self._count_requests(at)

    def report(self, engine: int, stats: EngineStats) -> None:
        """Take over what an engine says of other servers' requests, and of its cache."""
        self.take(
            engine,
            running=stats.num_running,
            waiting=stats.num_waiting,
            tokens=stats.num_queued_tokens,
            share=stats.shares.get(self._client, (0, 0)),
            kv_cache_usage=stats.kv_cache_usage,
        )

    def take(
        self,
        at: int | slice,
        *,
        running: Numbers,
        waiting: Numbers,
        tokens: Numbers,
        share: tuple[Numbers, Numbers],
        kv_cache_usage: float | NDArray[np.float64],
    ) -> None:
        """``report`` of one engine or of many, in columns; ``share`` is this server's part of requests and tokens."""
        self._other_requests[at] = running + waiting - share[0]
        self._other_tokens[at] = tokens - share[1]
        self._reported_running[at] = running
        self._num_tokens[at] = self._own_tokens[at] + self._other_tokens[at]
        self._kv_cache_usage[at] = kv_cache_usage
        self._count_requests(at)

    def forget_report(self, engine: int) -> None:
        """The engine starts anew: what is said of its last incarnation is void."""
        self.report(engine, EngineStats())

    def _count_requests(self, at: int | slice) -> None:
        """What has come since the last report waits, as far as anybody here knows; what has gone was running."""
        total = self._own_requests[at] + self._other_requests[at]
        running = np.minimum(self._reported_running[at], total)
        self._num_running[at] = running
        self._num_waiting[at] = total - running


def _columns(num_engines: int, count: int) -> list[NDArray[np.int64]]:
    return [np.zeros(num_engines, np.int64) for _ in range(count)]


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
