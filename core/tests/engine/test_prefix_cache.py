from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.engine.block_pool import BlockPool
from fourfold.engine.prefix_cache import (
    MAX_ENDS,
    MAX_MARKED_BLOCKS,
    MAX_MARKS,
    PrefixSketch,
    extend_chain,
    longest_hit,
    prompt_marks,
    read_marks,
)


def _chain(tokens: list[int], num_blocks: int, salt: str = "") -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, tokens, num_blocks, 4, salt)
    return digests


def test_a_digest_covers_all_tokens_before_it() -> None:
    tokens = list(range(12))
    changed = [99, *tokens[1:]]
    assert len(set(_chain(tokens, 3))) == 3
    assert not set(_chain(tokens, 3)) & set(_chain(changed, 3))
    late = [*tokens[:8], 99, *tokens[9:]]
    assert _chain(tokens, 3)[:2] == _chain(late, 3)[:2]
    assert _chain(tokens, 3)[2] != _chain(late, 3)[2]


def test_a_chain_grown_in_pieces_is_the_same() -> None:
    tokens = list(range(100, 120))
    digests = _chain(tokens, 2)
    extend_chain(digests, tokens, 1, 4, "")
    extend_chain(digests, tokens, 5, 4, "")
    assert digests == _chain(tokens, 5)


def test_salts_share_nothing() -> None:
    tokens = list(range(8))
    assert not set(_chain(tokens, 2)) & set(_chain(tokens, 2, "a"))
    assert not set(_chain(tokens, 2, "b")) & set(_chain(tokens, 2, "a"))


@given(
    held=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=3),
    windows=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_longest_hit_is_what_trying_every_length_finds(held: list[set[int]], windows: list[int]) -> None:
    digests = [bytes([index]) for index in range(8)]
    pools = []
    for indices in held:
        pool = BlockPool(9)
        for index, block in zip(sorted(indices), pool.allocate(len(indices))):
            pool.remember(block, digests[index])
        pools.append(pool)
    windows = windows[: len(pools)]

    def works(length: int) -> bool:
        return all(
            set(range(max(0, length - window) if window else 0, length)) <= indices
            for indices, window in zip(held, windows)
        )

    assert longest_hit(digests, pools, windows) == max(length for length in range(9) if works(length))


class Sketched:
    """A cache of chains, and its description."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.sketch = PrefixSketch(self.pool)

    def run(self, tokens: list[int], num_blocks: int, *, hit: int = 0) -> None:
        """A request that fills ``num_blocks``, of which ``hit`` are there, and ends."""
        digests = _chain(tokens, num_blocks)
        held = [self.pool.find(digest) for digest in digests[:hit]]
        for block in held:
            self.pool.share(block)
        self.sketch.found(digests, hit)
        blocks = held + self.pool.allocate(num_blocks - hit)
        for block, digest in zip(blocks[hit:], digests[hit:]):
            self.pool.remember(block, digest)
        self.sketch.filled(digests, hit, num_blocks)
        self.sketch.ended(digests, num_blocks)
        self.pool.release(blocks)

    def depth(self, tokens: list[int]) -> int:
        """Blocks of the longest prefix of a prompt that the description shows."""
        known = set(read_marks(self.sketch.marks()).tolist())
        return max(
            (depth for depth, mark in enumerate(prompt_marks(tokens, 4, "").tolist(), 1) if mark in known), default=0
        )


def test_marks_of_a_prompt_leave_out_the_last_token() -> None:
    assert len(prompt_marks(list(range(8)), 4, "")) == 1
    assert len(prompt_marks(list(range(9)), 4, "")) == 2
    assert len(prompt_marks([1], 4, "")) == 0
    assert len(prompt_marks([1] * 10_000, 4, "")) == MAX_MARKED_BLOCKS


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_a_prompt_that_an_engine_will_refuse_has_no_marks(wrong: int) -> None:
    assert len(prompt_marks([1] * 9 + [wrong] * 9, 4, "")) == 0


def test_marks_of_a_prompt_are_those_of_its_digests() -> None:
    tokens = list(range(49_000, 49_081))
    marks = [int.from_bytes(digest[-4:], "little") for digest in _chain(tokens, 20, "salt")]
    assert prompt_marks(tokens, 4, "salt").tolist() == marks
    assert len(set(marks)) == 20
    assert not set(marks) & set(prompt_marks(tokens, 4, "").tolist())


def test_a_next_turn_is_found_where_the_last_one_ended() -> None:
    cache, tokens = Sketched(400), list(range(200))
    cache.run(tokens, 23)
    assert cache.depth(tokens) == 23
    cache.run(tokens, 37, hit=23)
    assert cache.depth(tokens) == 37


@pytest.mark.parametrize("shared", [1, 2, 3, 5, 7, 11, 33])
def test_a_prompt_that_begins_alike_is_found_in_part(shared: int) -> None:
    cache, tokens = Sketched(400), list(range(300))
    cache.run(tokens, 50)
    other = tokens[: shared * 4] + [7] * 100
    assert 2 / 3 * shared <= cache.depth(other) <= shared


def test_what_is_lost_is_not_described() -> None:
    cache = Sketched(30)
    cache.run(list(range(100)), 20)
    cache.run(list(range(500, 600)), 25)
    assert cache.depth(list(range(500, 600))) > 20
    assert cache.depth(list(range(100))) < 20
    cache.pool.forget_all()
    assert cache.sketch.marks() == b""


def test_a_description_is_bounded_and_of_the_last() -> None:
    cache = Sketched(12_000)
    for number in range(2500):
        cache.run([number] * 100, 4)
    marks = cache.sketch.marks()
    assert len(marks) <= 4 * MAX_MARKS <= 4096
    assert all(cache.depth([number] * 100) == 4 for number in range(2500 - MAX_ENDS, 2500, 50))
    assert cache.depth([0] * 100) == 0


def test_a_turn_takes_the_place_of_the_one_before() -> None:
    """However many turns two conversations have, where a third one ended is not forgotten."""
    cache, third = Sketched(1000), [7] * 100
    cache.run(third, 5)
    for tokens in ([1] * 2000, [2] * 2000):
        for num_blocks in range(1, MAX_ENDS // 2 + 20):
            cache.run(tokens, num_blocks, hit=num_blocks - 1)
    assert cache.depth(third) == 5
