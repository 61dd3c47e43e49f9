"""What every load balancer must do. An author writes ``class TestMine(LoadBalancerConformance): name = "mine"``."""

from __future__ import annotations

import asyncio
import random
import threading
import timeit
import tracemalloc
from collections import Counter
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from fourfold.client.load_table import LoadTable
from fourfold.contracts.load_balancer import BalancedRequest, EngineState, LoadBalancer
from fourfold.engine.prefix_cache import MAX_MARKS
from fourfold.entries import LoadBalancerContext, LoadBalancerEntry
from fourfold.errors import RequestError
from fourfold.messages import EngineStats
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance

DECISION_SECONDS = 50e-6
"""At 64 engines, with the marks of the prompt at hand."""
LEARNING_SECONDS = 5e-3
"""For what one engine says of its cache."""
MEBIBYTE = 1 << 20
NO_MARKS = np.zeros(0, np.uint32)


def request(
    num_prompt_tokens: int = 100, max_tokens: int = 50, marks: NDArray[np.uint32] = NO_MARKS
) -> BalancedRequest:
    """A request whose prompt has these marks."""
    return BalancedRequest(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, read_marks=lambda: marks)


def ready_table(num_engines: int) -> LoadTable:
    """Idle engines, all ready."""
    table = LoadTable(num_engines, 0)
    for engine in range(num_engines):
        table.set_state(engine, EngineState.READY)
    return table


class LoadBalancerConformance(Conformance):
    """The load-balancer contract. The entry's capability ``load_aware`` is tested both ways."""

    name: ClassVar[str]
    """The entry's name."""

    @pytest.fixture
    def entry(self) -> LoadBalancerEntry:
        """The entry, found through its entry point, so that packaging is tested too."""
        return load_plugins().load_balancers()[self.name]

    def build(self, entry: LoadBalancerEntry, num_engines: int, *, num_servers: int = 1, seed: int = 0) -> LoadBalancer:
        """A balancer of one API server."""
        return entry.build(LoadBalancerContext(num_engines=num_engines, num_servers=num_servers, seed=seed))

    def test_it_chooses_ready_engines_only(self, entry: LoadBalancerEntry) -> None:
        generator, states = random.Random(1), list(EngineState)
        balancer, table = self.build(entry, 6), LoadTable(6, 0)
        prompts = [random_marks(generator, 20) for _ in range(10)]
        for _ in range(500):
            table.set_state(generator.randrange(6), generator.choice(states))
            table.report(generator.randrange(6), random_stats(generator))
            balancer.learn_prefixes(generator.randrange(6), generator.choice(prompts))
            if not table.loads.ready.any():
                table.set_state(generator.randrange(6), EngineState.READY)
            chosen = balancer.choose(request(marks=generator.choice(prompts)), table.loads)
            assert type(chosen) is int
            assert table.loads.states[chosen] is EngineState.READY
            table.begin(chosen, 150)

    def test_it_refuses_in_words_when_no_engine_is_ready(self, entry: LoadBalancerEntry) -> None:
        balancer, table = self.build(entry, 3), LoadTable(3, 0)
        table.set_state(1, EngineState.DRAINING)
        table.set_state(2, EngineState.DEAD)
        with pytest.raises(
            RequestError, match="engine 0 is starting, engine 1 is draining, engine 2 is dead"
        ) as caught:
            balancer.choose(request(), table.loads)
        assert caught.value.status == 503

    def test_an_engine_that_comes_back_gets_requests_again(self, entry: LoadBalancerEntry) -> None:
        balancer, table = self.build(entry, 2), ready_table(2)
        table.set_state(1, EngineState.DEAD)
        assert {balancer.choose(request(), table.loads) for _ in range(20)} == {0}
        balancer.learn_prefixes(1, NO_MARKS)
        table.set_state(1, EngineState.READY)
        assert self.spread(balancer, table, 40)[1] > 0

    def test_it_keeps_away_from_a_busy_engine_if_it_claims_to(self, entry: LoadBalancerEntry) -> None:
        balancer, table = self.build(entry, 8), ready_table(8)
        table.report(3, EngineStats(num_running=100, num_waiting=100, num_queued_tokens=10**6, kv_cache_usage=1.0))
        counts = self.spread(balancer, table, 400)
        if "load_aware" in entry.capabilities:
            assert counts[3] < 400 / 8 / 4
        else:
            assert counts[3] > 400 / 8 / 4, "it keeps away from busy engines; claim the capability load_aware"

    def test_a_burst_before_the_first_report_is_spread(self, entry: LoadBalancerEntry) -> None:
        counts = self.spread(self.build(entry, 8), ready_table(8), 160)
        assert len(counts) == 8
        assert max(counts.values()) <= 3 * 160 / 8

    def test_one_seed_makes_one_sequence_of_choices(self, entry: LoadBalancerEntry) -> None:
        assert self.sequence(entry) == self.sequence(entry)

    def test_api_servers_do_not_all_begin_with_one_engine(self, entry: LoadBalancerEntry) -> None:
        table = ready_table(8)
        firsts = {self.build(entry, 8, num_servers=32, seed=seed).choose(request(), table.loads) for seed in range(32)}
        assert len(firsts) > 1

    def test_it_needs_no_event_loop_and_no_thread(self, entry: LoadBalancerEntry) -> None:
        found: list[list[int]] = []
        threads = threading.active_count()

        async def inside() -> None:
            found.append(self.sequence(entry))

        asyncio.run(inside())
        assert threading.active_count() == threads
        thread = threading.Thread(target=lambda: found.append(self.sequence(entry)))
        thread.start()
        thread.join(30)
        assert found[0] == found[1]

    def test_memory_is_bounded_whatever_users_send(self, entry: LoadBalancerEntry) -> None:
        balancer, table = self.build(entry, 4), ready_table(4)
        tracemalloc.start()
        try:
            self.flood(balancer, table, 0)
            before, _ = tracemalloc.get_traced_memory()
            self.flood(balancer, table, 1)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 4 * MEBIBYTE

    def test_it_decides_fast(self, entry: LoadBalancerEntry) -> None:
        generator = random.Random(2)
        balancer, table = self.build(entry, 64, num_servers=4), ready_table(64)
        prompts = [random_marks(generator, 62) for _ in range(64)]
        for engine, marks in enumerate(prompts):
            table.report(engine, random_stats(generator))
            told = np.concatenate([random_marks(generator, MAX_MARKS - len(marks)), marks])
            seconds = min(timeit.repeat(partial(balancer.learn_prefixes, engine, told), number=1, repeat=2))
            assert seconds < LEARNING_SECONDS
        requests = [request(marks=marks) for marks in prompts] + [request(marks=random_marks(generator, 62))]

        def decide() -> None:
            for one in requests:
                balancer.choose(one, table.loads)

        # The best of many, so that what else this machine does counts as little as it can.
        assert min(timeit.repeat(decide, number=1, repeat=50)) / len(requests) < DECISION_SECONDS

    def spread(self, balancer: LoadBalancer, table: LoadTable, count: int) -> Counter[int]:
        """How many of ``count`` equal requests go to each engine, if none of them ends."""
        counts: Counter[int] = Counter()
        for _ in range(count):
            chosen = balancer.choose(request(), table.loads)
            table.begin(chosen, 150)
            counts[chosen] += 1
        return counts

    def sequence(self, entry: LoadBalancerEntry) -> list[int]:
        """Choices under a load that is the same each time."""
        generator = random.Random(3)
        balancer, table = self.build(entry, 8, num_servers=2, seed=5), ready_table(8)
        chosen = []
        for _ in range(200):
            table.report(generator.randrange(8), random_stats(generator))
            chosen.append(balancer.choose(request(marks=random_marks(generator, 4)), table.loads))
        return chosen

    def flood(self, balancer: LoadBalancer, table: LoadTable, seed: int) -> None:
        """Many prompts, and many descriptions of caches, no two alike."""
        generator = random.Random(seed)
        for index in range(10_000):
            balancer.choose(request(marks=random_marks(generator, 40)), table.loads)
            if index % 200 == 0:
                balancer.learn_prefixes(index // 200 % 4, random_marks(generator, MAX_MARKS))


def random_marks(generator: random.Random, count: int) -> NDArray[np.uint32]:
    """Marks that nothing else has."""
    return np.frombuffer(generator.randbytes(4 * count), np.uint32)


def random_stats(generator: random.Random) -> EngineStats:
    """A report of an engine with some load of other API servers."""
    return EngineStats(
        num_running=generator.randrange(50),
        num_waiting=generator.randrange(5),
        num_queued_tokens=generator.randrange(20_000),
        kv_cache_usage=generator.random(),
    )
