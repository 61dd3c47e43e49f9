"""``prefix-affinity``: the engine that holds the longest prefix of the prompt, unless it has too much to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fourfold.balancers.least_work import LeastBusy, pending_work
from fourfold.balancers.prefix_memory import PrefixMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fourfold.contracts.load_balancer import BalancedRequest, EngineLoads
    from fourfold.entries import LoadBalancerContext

BAND = 0.5
"""An engine may have this much more to do than the average one and keep its conversations."""
PATIENCE = 4
"""And beyond that, this many tokens to do for each token that need not be computed again."""


class PrefixAffinity:
    """Without a known prefix, or when all that hold it are outside the band: least work."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._pick = LeastBusy(context)
        self._block_size = context.block_size
        self._memory = PrefixMemory(context.num_engines)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        """As ``LoadBalancer`` says."""
        engines = loads.ready_engines()
        work = pending_work(loads)
        marks = request.read_marks().tolist()
        holders, num_blocks = self._memory.longest(marks, loads.ready)
        chosen = -1
        if holders:
            limit = (1 + BAND) * float(work[engines].sum()) / len(engines) + PATIENCE * num_blocks * self._block_size
            holder = min(holders, key=lambda engine: float(work[engine]))
            if work[holder] <= limit:
                chosen = holder
        if chosen < 0:
            chosen = self._pick(request, engines, work[engines])
        self._memory.send(marks, chosen)
        return chosen

    def learn_prefixes(self, engine: int, marks: NDArray[np.uint32]) -> None:
        """As ``LoadBalancer`` says."""
        self._memory.learn(engine, marks.tolist())
