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
    """Least work first; at random among those that have equally little, as far as one API server can know."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._pick = LeastBusy(context)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """As ``LoadBalancer`` says."""
        engines = loads.ready_engines()
        return self._pick(request, engines, pending_work(loads)[engines])

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """Prefixes make no difference."""


def pending_work(loads: EngineLoads) -> NDArray[np.float64]:
    """Tokens still to do on each engine; on a full KV cache they count twice, for some will be done twice."""
    work = loads.num_tokens.astype(np.float64)
    if loads.kv_cache_usage.max() > FULL_CACHE:
        work *= 1 + np.maximum(loads.kv_cache_usage - FULL_CACHE, 0.0) / (1 - FULL_CACHE)
    return work


class LeastBusy:
    """Picks one of the engines that have the least work.

    With several API servers, a difference that is smaller than the request itself is none: since the last report any
    other server may have sent one like it. Otherwise all would choose the same engine at the same time. The more of
    them there are, the less a server knows of the whole.
    """

    def __init__(self, context: LoadBalancerContext) -> None:
        self._random = random.Random(context.seed)
        self._unknown = 1 - 1 / context.num_servers

    def __call__(self, request: BalancedRequest, engines: NDArray[np.intp], work: NDArray[np.float64]) -> int:
        """One of ``engines``; ``work`` has an element for each."""
        slack = self._unknown * (request.num_prompt_tokens + request.max_tokens)
        best = (work <= work.min() + slack).nonzero()[0]
        return int(engines[best[int(self._random.random() * len(best))]])
