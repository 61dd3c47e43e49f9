from __future__ import annotations

import random

import pytest

from fourfold.balancers.least_work import LeastWork
from fourfold.client.load_table import LoadTable
from fourfold.contracts.load_balancer import BalancedRequest, EngineState
from fourfold.entries import LoadBalancerContext
from fourfold.errors import RequestError
from fourfold.messages import EngineStats
from fourfold.testing.load_balancer import ready_table, request


def stats(*, tokens: int, mine: int, requests: int = 0, my_requests: int = 0) -> EngineStats:
    return EngineStats(
        num_running=requests, num_queued_tokens=tokens, shares={0: (my_requests, mine), 1: (requests, tokens - mine)}
    )


def test_a_report_does_not_forget_what_was_sent_since() -> None:
    table = LoadTable(2, 0)
    table.begin(0, 100)
    table.begin(0, 30)
    table.report(0, stats(tokens=170, mine=100, requests=2, my_requests=1))  # it has not seen the second
    assert table.loads.num_tokens.tolist() == [100 + 30 + 70, 0]
    assert (table.loads.num_running[0], table.loads.num_waiting[0]) == (2, 1)


def test_a_report_does_not_bring_back_what_has_ended_since() -> None:
    table = LoadTable(1, 0)
    table.begin(0, 100)
    table.progress(0, 60)
    table.end(0, 40)
    table.report(0, stats(tokens=170, mine=100, requests=2, my_requests=1))  # it is from before all that
    assert table.loads.num_tokens.tolist() == [70]
    assert (table.loads.num_running[0], table.loads.num_waiting[0]) == (1, 0)


def test_counters_return_to_zero() -> None:
    """As many requests as an API server sees in days, with aborts and reports of any age between."""
    generator = random.Random(0)
    table = LoadTable(4, 0)
    open_requests: list[tuple[int, int]] = []
    for _ in range(20_000):
        if open_requests and generator.random() < 0.5:
            engine, left = open_requests.pop(generator.randrange(len(open_requests)))
            if generator.random() < 0.5:
                done = generator.randint(0, left)
                table.progress(engine, done)
                left -= done
            table.end(engine, left)
        else:
            engine, tokens = generator.randrange(4), generator.randrange(1, 5000)
            table.begin(engine, tokens)
            open_requests.append((engine, tokens))
        if generator.random() < 0.1:
            old = generator.randrange(9000)
            table.report(generator.randrange(4), stats(tokens=old + 500, mine=old, requests=3, my_requests=1))
    for engine, left in open_requests:
        table.end(engine, left)
    for engine in range(4):
        assert (table.own_requests(engine), table.own_tokens(engine)) == (0, 0)
        table.report(engine, EngineStats())
    assert table.loads.num_tokens.tolist() == table.loads.num_waiting.tolist() == [0] * 4


def test_a_new_incarnation_has_no_load_of_others() -> None:
    table = LoadTable(1, 0)
    table.report(0, stats(tokens=170, mine=0, requests=2))
    table.forget_report(0)
    assert (table.loads.num_tokens[0], table.loads.num_running[0], table.loads.num_waiting[0]) == (0, 0, 0)


def test_loads_cannot_be_written_to() -> None:
    table = LoadTable(1, 0)
    with pytest.raises(ValueError, match="read-only"):
        table.loads.num_tokens[0] = 5


def test_many_engines_are_refused_in_few_words() -> None:
    table = LoadTable(1000, 0)
    table.set_state(0, EngineState.DEAD)
    with pytest.raises(
        RequestError, match=r"engine 0 is dead, engine 1 .* and 992 more are not ready either"
    ) as caught:
        table.loads.ready_engines()
    assert len(str(caught.value)) < 400


def test_a_burst_before_the_first_report_is_even() -> None:
    table, balancer = ready_table(8), LeastWork(LoadBalancerContext(num_engines=8))
    for _ in range(100):
        table.begin(balancer.choose(request(), table.loads), 150)
    counts = [table.own_requests(engine) for engine in range(8)]
    assert max(counts) - min(counts) <= 1


def test_one_huge_prompt_weighs_as_much_as_many_small_ones() -> None:
    table, balancer = ready_table(4), LeastWork(LoadBalancerContext(num_engines=4))
    for index in range(200):
        tokens = 10_000 if index == 20 else 1000
        one = BalancedRequest(num_prompt_tokens=tokens, max_tokens=0, read_marks=lambda: pytest.fail("not needed"))
        table.begin(balancer.choose(one, table.loads), tokens)
    assert table.loads.num_tokens.max() / table.loads.num_tokens.min() < 1.3
