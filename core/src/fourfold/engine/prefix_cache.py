"""Digests of prompt prefixes, block by block, and the longest prefix that every group still holds.

A block's digest covers all tokens up to its end and the request's salt. It is cryptographic, so that no user can craft
a prompt that meets another's blocks. Knows no request and no reference counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from fourfold.engine.block_pool import BlockPool

DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """The start of every chain with this salt."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"fourfold-salt").digest()


def extend_chain(digests: list[bytes], token_ids: Sequence[int], num_blocks: int, block_size: int, salt: str) -> None:
    """Append to ``digests``, one a full block from the start, until there are ``num_blocks``."""
    if len(digests) >= num_blocks:
        return
    parent = digests[-1] if digests else root_digest(salt)
    for index in range(len(digests), num_blocks):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


def longest_hit(digests: Sequence[bytes], pools: Sequence[BlockPool], windows: Sequence[int]) -> int:
    """Blocks of the longest prefix that can be skipped.

    ``windows[i]`` is how many blocks before the end of the prefix pool i must hold, 0 for all of them.
    """
    hit = len(digests)
    for pool, window in zip(pools, windows):
        if window == 0:
            hit = _held_from_start(digests, pool, hit)
    agreed = False
    while not agreed:
        agreed = True
        for pool, window in zip(pools, windows):
            if window > 0:
                shorter = _held_at_end(digests, pool, hit, window)
                agreed = agreed and shorter == hit
                hit = shorter
    return hit


def _held_from_start(digests: Sequence[bytes], pool: BlockPool, limit: int) -> int:
    for index in range(limit):
        if pool.find(digests[index]) is None:
            return index
    return limit


def _held_at_end(digests: Sequence[bytes], pool: BlockPool, limit: int, window: int) -> int:
    """The longest prefix of at most ``limit`` blocks whose last ``window`` blocks (or all) are held."""
    end = limit
    index = limit - 1
    while index >= 0 and end - index <= window:
        if pool.find(digests[index]) is None:
            end = index
        index -= 1
    return end
