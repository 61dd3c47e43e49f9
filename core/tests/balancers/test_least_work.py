from __future__ import annotations

from fourfold.balancers.least_work import LeastWork
from fourfold.entries import LoadBalancerContext
from fourfold.messages import EngineStats
from fourfold.testing.load_balancer import ready_table, request


def chosen(tokens: list[int], usage: list[float], *, num_servers: int = 1, size: int = 10) -> set[int]:
    """Engines that are chosen at all."""
    table = ready_table(len(tokens))
    for engine, (queued, used) in enumerate(zip(tokens, usage)):
        table.report(engine, EngineStats(num_running=1, num_queued_tokens=queued, kv_cache_usage=used))
    balancer = LeastWork(LoadBalancerContext(num_engines=len(tokens), num_servers=num_servers))
    return {balancer.choose(request(size, size), table.loads) for _ in range(50)}


def test_fewest_tokens_win() -> None:
    assert chosen([30, 10, 20], [0, 0, 0]) == {1}


def test_a_full_cache_counts_against_an_engine() -> None:
    assert chosen([100, 120], [1.0, 0.5]) == {1}
    assert chosen([100, 120], [0.89, 0.5]) == {0}


def test_equals_share() -> None:
    assert chosen([10, 10, 11], [0, 0, 0]) == {0, 1}


def test_beside_others_a_difference_below_the_request_is_none() -> None:
    assert chosen([10, 20, 40], [0, 0, 0], num_servers=4, size=10) == {0, 1}
    assert chosen([10, 20, 40], [0, 0, 0], num_servers=1, size=10) == {0}
