from __future__ import annotations

from collections import Counter

from fourfold.client.load_balancers import LeastTokens
from fourfold.contracts.load_balancer import BalancedRequest, EngineLoad
from fourfold.entries import LoadBalancerContext

REQUEST = BalancedRequest(prompt_token_ids=(1, 2, 3), max_tokens=4, cache_salt="")


def load(engine: int, num_queued_tokens: int = 0) -> EngineLoad:
    return EngineLoad(
        engine=engine,
        ready=True,
        num_running=0,
        num_waiting=0,
        num_queued_tokens=num_queued_tokens,
        kv_cache_usage=0.0,
    )


def test_takes_the_engine_with_the_fewest_tokens() -> None:
    balancer = LeastTokens(LoadBalancerContext(num_engines=3))
    assert balancer.choose(REQUEST, [load(0, 30), load(1, 10), load(2, 20)]) == 1


def test_equal_engines_take_turns() -> None:
    balancer = LeastTokens(LoadBalancerContext(num_engines=3))
    chosen = [balancer.choose(REQUEST, [load(0), load(1), load(2)]) for _ in range(6)]
    assert chosen[:3] == chosen[3:]
    assert sorted(chosen[:3]) == [0, 1, 2]


def test_takes_only_engines_that_are_offered() -> None:
    balancer = LeastTokens(LoadBalancerContext(num_engines=4))
    assert Counter(balancer.choose(REQUEST, [load(1), load(3)]) for _ in range(8)) == {1: 4, 3: 4}
