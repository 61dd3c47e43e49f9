from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fourfold.engine.block_pool import BlockPool
from fourfold.engine.prefix_cache import extend_chain, longest_hit


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
