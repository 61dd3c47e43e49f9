"""``round-robin``: one engine after the other, whatever their load. What every other policy is compared with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fourfold.contracts.load_balancer import BalancedRequest, EngineLoads
    from fourfold.entries import LoadBalancerContext


class RoundRobin:
    """The next ready engine by number; the first is chosen at random."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._next = random.Random(context.seed).randrange(context.num_engines)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """As ``LoadBalancer`` says."""
        del request
        engines = loads.ready_engines()
        position = int(engines.searchsorted(self._next))
        chosen = int(engines[position if position < len(engines) else 0])
        self._next = chosen + 1
        return chosen

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """Prefixes make no difference."""
