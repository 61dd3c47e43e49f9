from __future__ import annotations

import random

import pytest

from fourfold.engine.block_pool import NULL_BLOCK, BlockPool
from fourfold.errors import EngineError


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_is_an_error_and_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(EngineError, match="3 cache blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_content_stays_findable_until_its_block_is_reused() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.remember(first, b"a")
    pool.remember(second, b"b")
    pool.release([first, second])
    assert pool.find(b"a") == first
    assert pool.allocate(1) == [second], "the end of a table is reused before its beginning"
    assert pool.find(b"b") is None
    assert pool.find(b"a") == first


def test_blocks_without_content_are_reused_first_then_the_least_recently_released() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    for block, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.remember(block, digest)
    for block in (b, a, d, c):
        pool.release([block])
    assert [pool.allocate(1)[0] for _ in range(4)] == [d, b, a, c]


def test_shared_blocks_come_back_with_their_last_holder() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    with pytest.raises(EngineError, match="released more often"):
        pool.release([block])


def test_a_free_block_with_content_can_be_shared_again() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.remember(block, b"a")
    pool.release([block])
    pool.share(block)
    assert not pool.is_free(block)
    assert pool.allocate(1) != [block]


def test_null_entries_of_a_table_are_passed_over() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.release([NULL_BLOCK, *blocks, NULL_BLOCK])
    assert pool.num_free == 2


def test_equal_content_is_found_in_the_first_block() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.remember(first, b"a")
    pool.remember(second, b"a")
    assert pool.find(b"a") == first
    pool.release([second])
    pool.allocate(1)
    assert pool.find(b"a") == first, "reusing the twin must not hide the first"


def test_forgetting_keeps_the_holders_blocks() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.remember(block, b"a")
    pool.forget_all()
    assert pool.find(b"a") is None
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.num_free == 2


def test_random_use_agrees_with_plain_counts() -> None:
    rng = random.Random(1)
    pool = BlockPool(12)
    held: list[int] = []
    for step in range(3000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            block = pool.allocate(1)[0]
            assert block not in held
            held.append(block)
        elif action < 0.5 and held:
            pool.remember(rng.choice(held), bytes([step % 20]))
        elif action < 0.7:
            found = pool.find(bytes([rng.randrange(20)]))
            if found is not None:
                pool.share(found)
                held.append(found)
        elif held:
            pool.release([held.pop(rng.randrange(len(held)))])
        assert pool.num_free == 11 - len(set(held))
        assert all(pool.is_free(block) == (block not in held) for block in range(1, 12))
