"""``least-work``: the engine with the fewest tokens still to do, and with room in its KV cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fourfold.contracts.load_balancer import BalancedRequest, EngineLoads
    from fourfold.entries import LoadBalancerContext

FULL_CACHE = 0.9
"""Share of the KV cache from which on requests begin to wait for each other's blocks."""


class LeastWork:
    """Least work first; engines with equally little are chosen at random."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._random = random.Random(context.seed)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """As ``LoadBalancer`` says."""
        del request  # whatever it needs, it needs everywhere
        engines = loads.ready_engines()
        return least_busy(engines, pending_work(loads)[engines], self._random)

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """Prefixes make no difference."""


def pending_work(loads: EngineLoads) -> NDArray[np.float64]:
    """Tokens still to do on each engine; on a full KV cache they count twice, for some will be done twice."""
    pressure = np.maximum(loads.kv_cache_usage - FULL_CACHE, 0.0)
    pressure *= 1 / (1 - FULL_CACHE)
    pressure += 1.0
    pressure *= loads.num_tokens
    return pressure


def least_busy(engines: NDArray[np.intp], work: NDArray[np.float64], generator: random.Random) -> int:
    """One of ``engines`` that has the least ``work``; one element each."""
    best = (work == work.min()).nonzero()[0]
    return int(engines[best[int(generator.random() * len(best))]])
