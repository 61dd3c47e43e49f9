"""``random-two``: of two engines drawn at random the one with less work.

Nearly as even as looking at all, and steadier when many API servers decide by the same old reports: they do not all run
to the one engine that was idle. After Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fourfold.contracts.load_balancer import BalancedRequest, EngineLoads
    from fourfold.entries import LoadBalancerContext


class RandomTwo:
    """Two different engines where there are two."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._random = random.Random(context.seed)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """As ``LoadBalancer`` says."""
        del request
        engines = loads.ready_engines()
        count = len(engines)
        position = int(self._random.random() * count)
        one = int(engines[position])
        if count == 1:
            return one
        other = int(engines[(position + 1 + int(self._random.random() * (count - 1))) % count])
        return one if loads.num_tokens[one] <= loads.num_tokens[other] else other

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """Prefixes make no difference."""
