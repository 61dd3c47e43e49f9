from __future__ import annotations

import itertools

from fourfold.balancers.round_robin import RoundRobin
from fourfold.contracts.load_balancer import EngineState
from fourfold.entries import LoadBalancerContext
from fourfold.testing.load_balancer import ready_table, request


def test_round_robin_takes_one_after_the_other() -> None:
    balancer, table = RoundRobin(LoadBalancerContext(num_engines=3)), ready_table(3)
    chosen = [balancer.choose(request(), table.loads) for _ in range(9)]
    assert all((after - before) % 3 == 1 for before, after in itertools.pairwise(chosen))
    table.set_state(1, EngineState.DRAINING)
    chosen = [balancer.choose(request(), table.loads) for _ in range(8)]
    assert sorted(chosen) == [0] * 4 + [2] * 4
