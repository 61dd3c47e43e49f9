from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from fourfold.balancers.prefix_affinity import PrefixAffinity
from fourfold.contracts.load_balancer import EngineState
from fourfold.engine.prefix_cache import prompt_marks
from fourfold.entries import LoadBalancerContext
from fourfold.messages import EngineStats
from fourfold.testing.load_balancer import NO_MARKS, ready_table, request


def marks(*tokens: int, salt: str = "") -> NDArray[np.uint32]:
    """Of a prompt in which each token stands for a block, with a last one that has no mark."""
    return prompt_marks([token for token in tokens for _ in range(16)] + [0], 16, salt)


def affinity(num_engines: int = 4) -> PrefixAffinity:
    return PrefixAffinity(LoadBalancerContext(num_engines=num_engines, num_servers=4))


def test_what_this_server_sent_is_remembered() -> None:
    balancer, table = affinity(), ready_table(4)
    for talk in range(40):
        first = balancer.choose(request(48, marks=marks(talk, 1, 2)), table.loads)
        assert balancer.choose(request(80, marks=marks(talk, 1, 2, 3, 4)), table.loads) == first


def test_what_engines_say_is_believed() -> None:
    balancer, table = affinity(), ready_table(4)
    balancer.learn_prefixes(2, marks(7, 8, 9)[-1:])
    assert balancer.choose(request(100, marks=marks(7, 8, 9, 10)), table.loads) == 2


def test_the_longest_prefix_wins() -> None:
    balancer, table = affinity(), ready_table(4)
    balancer.learn_prefixes(0, marks(1, 2))
    balancer.learn_prefixes(3, marks(1, 2, 3))
    balancer.learn_prefixes(1, marks(1))
    assert balancer.choose(request(100, marks=marks(1, 2, 3, 4)), table.loads) == 3


def test_of_equal_holders_the_less_busy_wins() -> None:
    balancer, table = affinity(), ready_table(4)
    balancer.learn_prefixes(0, marks(1, 2))
    balancer.learn_prefixes(3, marks(1, 2))
    table.begin(0, 30)
    assert balancer.choose(request(100, marks=marks(1, 2, 3)), table.loads) == 3


def test_outside_the_band_a_new_place_is_found_and_kept() -> None:
    balancer, table = affinity(), ready_table(4)
    balancer.learn_prefixes(0, marks(1, 2))
    table.report(0, EngineStats(num_running=9, num_queued_tokens=5000))
    other = balancer.choose(request(100, marks=marks(1, 2, 3)), table.loads)
    assert other != 0
    table.report(0, EngineStats(num_running=9, num_queued_tokens=5001))
    assert balancer.choose(request(100, marks=marks(1, 2, 3, 4)), table.loads) == other


def test_a_dead_engines_prefixes_are_no_ones() -> None:
    balancer, table = affinity(2), ready_table(2)
    first = balancer.choose(request(48, marks=marks(1, 2)), table.loads)
    table.set_state(first, EngineState.DEAD)
    assert balancer.choose(request(48, marks=marks(1, 2)), table.loads) == 1 - first
    table.set_state(first, EngineState.READY)
    balancer.learn_prefixes(first, NO_MARKS)
    assert {balancer.choose(request(48, marks=marks(1, 2)), table.loads) for _ in range(20)} == {1 - first}


def test_a_salt_is_another_prefix() -> None:
    assert not set(marks(1, 2).tolist()) & set(marks(1, 2, salt="x").tolist())


def test_descriptions_that_change_leave_nothing_behind() -> None:
    generator, balancer, table = random.Random(0), affinity(), ready_table(4)
    prompts = [marks(number, 1) for number in range(50)]
    for _ in range(300):
        balancer.learn_prefixes(generator.randrange(4), np.concatenate(generator.sample(prompts, 5)))
    for engine in range(4):
        balancer.learn_prefixes(engine, NO_MARKS)
    assert not balancer._memory._holders
    balancer.learn_prefixes(1, prompts[0])
    assert balancer.choose(request(40, marks=prompts[0]), table.loads) == 1


def test_eight_conversations_stay_where_they_began() -> None:
    """Eight conversations of five turns on two engines, at two API servers in turn."""
    tables = [ready_table(2), ready_table(2)]
    balancers = [affinity(2), affinity(2)]
    kept, places, held = 0, {}, [[], []]
    for turn in range(5):
        for talk in range(8):
            server = (turn + talk) % 2
            said = marks(talk, *range(1, 4 * turn + 4))
            place = balancers[server].choose(request(16 * len(said), marks=said), tables[server].loads)
            kept += places.get(talk) == place
            places[talk] = place
            held[place].append(said)
            for balancer in balancers:
                balancer.learn_prefixes(place, np.concatenate(held[place]))
    assert kept >= 0.8 * 8 * 4
    assert set(places.values()) == {0, 1}
