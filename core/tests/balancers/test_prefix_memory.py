from __future__ import annotations

import numpy as np

from fourfold.balancers.prefix_memory import MAX_HOLDERS, PrefixMemory

READY = np.ones(8, np.bool_)


def test_what_was_sent_is_found_by_any_prefix_of_it() -> None:
    memory = PrefixMemory(8)
    memory.send([10, 11, 12, 13, 14], 3)
    assert memory.longest([10, 11, 12, 13, 14, 15], READY) == ([3], 5)
    assert memory.longest([10, 11, 12, 13, 99], READY) == ([3], 4)
    assert memory.longest([10, 99], READY) == ([3], 1)
    assert memory.longest([99], READY) == ([], 0)
    assert memory.longest([], READY) == ([], 0)


def test_an_engine_that_starts_anew_holds_nothing_that_was_sent_to_it() -> None:
    memory = PrefixMemory(8)
    memory.send([10, 11], 3)
    memory.send([20, 21], 4)
    memory.learn(3, [])
    assert memory.longest([10, 11], READY) == ([], 0)
    assert memory.longest([20, 21], READY) == ([4], 2)
    memory.send([10, 11], 3)
    assert memory.longest([10, 11], READY) == ([3], 2)


def test_an_engine_that_is_not_ready_is_passed_over() -> None:
    memory = PrefixMemory(8)
    memory.learn(2, [10, 11])
    memory.learn(5, [10])
    ready = READY.copy()
    ready[2] = False
    assert memory.longest([10, 11], READY) == ([2], 2)
    assert memory.longest([10, 11], ready) == ([5], 1)


def test_a_description_takes_the_place_of_the_last() -> None:
    memory = PrefixMemory(8)
    memory.learn(2, [10, 11])
    memory.learn(2, [11, 12])
    assert memory.longest([10], READY) == ([], 0)
    assert memory.longest([10, 11], READY) == ([2], 2)


def test_enough_holders_are_enough() -> None:
    memory = PrefixMemory(8)
    for engine in range(8):
        memory.learn(engine, [10])
    holders, _ = memory.longest([10], READY)
    assert len(holders) == MAX_HOLDERS


def test_what_was_sent_long_ago_is_forgotten() -> None:
    memory = PrefixMemory(8)
    memory.send([1], 0)
    for mark in range(100, 100_000):
        memory.send([mark], 1)
    assert memory.longest([1], READY) == ([], 0)
    assert memory.longest([99_999], READY) == ([1], 1)
