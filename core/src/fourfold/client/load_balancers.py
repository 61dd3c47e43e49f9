"""Core's load balancers. Know loads, no sockets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fourfold.contracts.load_balancer import BalancedRequest, EngineLoad
from fourfold.entries import LoadBalancerContext


class LeastTokens:
    """The engine with the fewest tokens queued; engines that have equally few take turns."""

    def __init__(self, context: LoadBalancerContext) -> None:
        # Several API servers must not all begin with the same engine before the first report of load.
        self._turn = random.randrange(context.num_engines)
        self._num_engines = context.num_engines

    def choose(self, request: BalancedRequest, loads: Sequence[EngineLoad]) -> int:
        """The ``engine`` of one of ``loads``."""
        chosen = min(loads, key=lambda load: (load.num_queued_tokens, (load.engine - self._turn) % self._num_engines))
        self._turn = (chosen.engine + 1) % self._num_engines
        return chosen.engine
