"""Digests of prompt prefixes, block by block, the longest prefix that every group still holds, and a short description
of all that is held.

A block's digest covers all tokens up to its end and the request's salt. It is cryptographic, so that no user can craft
a prompt that meets another's blocks. Its last four bytes are its mark, a checksum of the same, which tells balancers
where a prefix is: they have to be quick, and who takes one for another loses nothing but time. Knows no request and no
reference counts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fourfold.engine.block_pool import BlockPool

DIGEST_BYTES = 16
MARK_BYTES = 4
_TOKEN_BYTES = array("I").itemsize
MAX_MARKS = 1024
"""Marks that describe one cache at most."""
MAX_ENDS = 768
"""Of these, the ends of requests."""
MAX_MARKED_BLOCKS = 512
"""Marks of a prompt at most: to hash more would hold up an API server longer than a better choice is worth."""
MARKED_DEPTHS = tuple(sorted({shape << power for shape in (2, 3) for power in range(9)} - {768} | {1}))
"""Lengths in blocks at which a prefix is described, beside where each request ended: 1, 2, 3, 4, 6, 8, 12, ... 512."""


def root_digest(salt: str, adapter: str = "") -> bytes:
    """The start of every chain with this salt and this LoRA adapter."""
    # Digests of long names, so that a key has at most the 64 bytes that the function takes.
    key = blake2b(adapter.encode(), digest_size=DIGEST_BYTES).digest() if adapter else b""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=key, person=b"fourfold-salt").digest()


def extend_chain(
    digests: list[bytes], token_ids: Sequence[int], num_blocks: int, block_size: int, salt: str, *, adapter: str = ""
) -> None:
    """Append to ``digests``, one a full block from the start, until there are ``num_blocks``."""
    done = len(digests)
    if done >= num_blocks:
        return
    parent = digests[-1] if digests else _root(salt, adapter)
    mark = int.from_bytes(parent[-MARK_BYTES:], "little")
    content, size = _content(token_ids[done * block_size : num_blocks * block_size]), block_size * _TOKEN_BYTES
    for start in range(0, len(content), size):
        block = content[start : start + size]
        mark = crc32(block, mark)
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest() + mark.to_bytes(MARK_BYTES, "little")
        digests.append(parent)


def prompt_marks(token_ids: Sequence[int], block_size: int, salt: str, adapter: str = "") -> NDArray[np.uint32]:
    """A mark for each full block of a prompt, from the start, ``MAX_MARKED_BLOCKS`` at most; some 20 us for 60 blocks.

    The block with the last token has none: an engine computes that token in any case. Nor has a prompt with numbers
    that are no tokens.
    """
    num_blocks = min((len(token_ids) - 1) // block_size, MAX_MARKED_BLOCKS)
    try:
        content, size = _content(token_ids[: num_blocks * block_size]), block_size * _TOKEN_BYTES
    except OverflowError:
        return read_marks(b"")
    mark, marks = int.from_bytes(_root(salt, adapter)[-MARK_BYTES:], "little"), []
    for start in range(0, len(content), size):
        mark = crc32(content[start : start + size], mark)
        marks.append(mark)
    return np.frombuffer(array("I", marks), np.uint32)


def _root(salt: str, adapter: str) -> bytes:
    root = root_digest(salt, adapter)
    return root + crc32(root).to_bytes(MARK_BYTES, "little")


def _content(token_ids: Sequence[int]) -> bytes:
    """Raises OverflowError for what is no token."""
    return array("I", token_ids).tobytes()


def read_marks(encoded: bytes) -> NDArray[np.uint32]:
    """Marks as they travel; four bytes each, the lowest first."""
    return np.frombuffer(encoded, dtype="<u4").astype(np.uint32, copy=False)


class PrefixSketch:
    """What a cache holds, in at most ``MAX_MARKS`` marks: where the last requests ended, for their next turn, and some
    lengths of the prefixes used last, for requests that begin alike and go on differently.

    Costs nothing a token, and a few dictionary operations a request.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ends: OrderedDict[bytes, None] = OrderedDict()
        self._beginnings: OrderedDict[bytes, None] = OrderedDict()

    def found(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """A request begins with ``num_blocks`` that are in the cache. If it is a next turn, its own end will do."""
        if num_blocks:
            self._ends.pop(digests[num_blocks - 1], None)
            self.filled(digests, 0, num_blocks)

    def filled(self, digests: Sequence[bytes], start: int, stop: int) -> None:
        """Blocks ``start`` to ``stop`` of a chain were put into the cache."""
        for depth in MARKED_DEPTHS[bisect_right(MARKED_DEPTHS, start) : bisect_right(MARKED_DEPTHS, stop)]:
            _use(self._beginnings, digests[depth - 1], MAX_MARKS - MAX_ENDS)

    def ended(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """A request ended that left its first ``num_blocks`` in the cache."""
        if 0 < num_blocks <= MAX_MARKED_BLOCKS:
            _use(self._ends, digests[num_blocks - 1], MAX_ENDS)

    def marks(self) -> bytes:
        """Marks of what is still held, the last used ones last; ``read_marks`` reads them."""
        find, known = self._pool.find, [*self._beginnings, *self._ends]
        return b"".join([digest[-MARK_BYTES:] for digest in known if find(digest) is not None])


def _use(table: OrderedDict[bytes, None], digest: bytes, limit: int) -> None:
    table[digest] = None
    table.move_to_end(digest)
    if len(table) > limit:
        table.popitem(last=False)


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
