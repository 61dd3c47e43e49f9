"""Which blocks each request holds in every KV-cache group: hits, growth, windows, release. Moves no tensor.

Tables of all groups run in step: entry i is for positions i * block_size onwards. A sliding-window group's entries
that left the window are the null block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.engine.block_pool import NULL_BLOCK, BlockPool
from fourfold.engine.prefix_cache import PrefixSketch, extend_chain, longest_hit
from fourfold.engine.request import Request
from fourfold.errors import ConfigError


def request_capacity(cache: KVCacheConfig) -> int | None:
    """Positions that one request can compute with the whole cache to itself; None: no limit."""
    usable = cache.num_blocks - 1
    if all(group.spec.sliding_window and usable >= window_blocks(group.spec) for group in cache.groups):
        return None
    return usable * cache.groups[0].spec.block_size


def blocks_for(groups: Sequence[KVCacheGroup], num_positions: int) -> int:
    """Blocks of each pool, the null block included, with which one request can compute ``num_positions``."""
    whole = [-(-num_positions // group.spec.block_size) for group in groups]
    windows = [window_blocks(group.spec) if group.spec.sliding_window else math.inf for group in groups]
    return 1 + max(int(min(pair)) for pair in zip(whole, windows))


def window_blocks(spec: KVCacheSpec) -> int:
    """Blocks that one token and the window before it touch at most."""
    return -(-(spec.sliding_window - 1) // spec.block_size) + 1


class KVCacheManager:
    """Owns one pool a group."""

    def __init__(self, cache: KVCacheConfig, *, prefix_caching: bool) -> None:
        sizes = sorted({group.spec.block_size for group in cache.groups})
        if len(sizes) != 1:
            raise ConfigError(f"the layers' caches have block sizes {sizes}; all layers need the same one")
        self.block_size = sizes[0]
        self.pools = [BlockPool(cache.num_blocks) for _ in cache.groups]
        self.no_blocks: list[list[int]] = [[] for _ in cache.groups]
        """Nothing to append in any group; shared, never changed."""
        self._prefix_caching = prefix_caching
        self._windows = [group.spec.sliding_window for group in cache.groups]
        # Of a hit: it ends with a full block, and the token after it is in the next one.
        self._window_blocks = [
            max(1, window_blocks(group.spec) - 1) if group.spec.sliding_window else 0 for group in cache.groups
        ]
        self._windowed = [index for index, window in enumerate(self._windows) if window]
        # A group without a window says most: what it has lost, no request can find.
        self._sketch = PrefixSketch(self.pools[self._windows.index(min(self._windows))])

    @property
    def usage(self) -> float:
        """Share of the fullest pool that requests hold, 0 to 1."""
        return max(1 - pool.num_free / pool.num_usable for pool in self.pools)

    def is_short(self, reserve: int) -> bool:
        """Whether some pool has no block beyond ``reserve``, so that nobody can be admitted."""
        return any(pool.num_free <= reserve for pool in self.pools)

    def find_hit(self, request: Request) -> int:
        """Positions of ``request`` that cached blocks hold. The last token is always left to compute."""
        if not self._prefix_caching or request.wants_prompt_logprobs:
            return 0
        limit = (len(request.token_ids) - 1) // self.block_size
        self._extend_chain(request, limit)
        digests = request.digests if len(request.digests) == limit else request.digests[:limit]
        return longest_hit(digests, self.pools, self._window_blocks) * self.block_size

    def admit(self, request: Request, hit: int, num_tokens: int, reserve: int) -> int:
        """Give a waiting request its first blocks: those of the hit, and new ones.

        Groups without a window get blocks for all known tokens, so that a prompt once begun is not starved; groups
        with one for the positions of the first chunk. ``reserve`` blocks of each pool are left. Returns how many of
        ``num_tokens`` positions after the hit may be computed now, 0 if it has to wait; then nothing has changed.
        """
        size = self.block_size
        num_hit = hit // size
        shared = [self._hit_blocks(request, index, num_hit) for index in range(len(self.pools))]
        spare = [pool.num_free - reserve - sum(map(pool.is_free, blocks)) for pool, blocks in zip(self.pools, shared)]
        if min(spare) < 1:
            return 0
        for index in self._windowed:
            num_tokens = min(num_tokens, spare[index] * size)
        whole = -(-len(request.token_ids) // size)
        first = -(-(hit + num_tokens) // size)
        fresh = [(first if window else whole) - num_hit for window in self._windows]
        if any(count > room for count, room in zip(fresh, spare)):
            return 0
        request.blocks = []
        for pool, blocks, count in zip(self.pools, shared, fresh):
            for block in blocks:
                if block != NULL_BLOCK:
                    pool.share(block)
            blocks.extend(pool.allocate(count))
            request.blocks.append(blocks)
        request.block_capacity = min(map(len, request.blocks)) * size
        request.num_remembered = num_hit
        self._sketch.found(request.digests, num_hit)
        request.num_trimmed = [max(0, num_hit - window) if window else 0 for window in self._window_blocks]
        return num_tokens

    def reach(self, request: Request) -> int:
        """Positions that ``request`` could cover with its blocks and all free ones."""
        return min(len(table) + pool.num_free for table, pool in zip(request.blocks, self.pools)) * self.block_size

    def extend(self, request: Request, num_positions: int) -> list[list[int]]:
        """Make every table of ``request`` cover ``num_positions``, at most ``reach``; returns the blocks appended."""
        needed = -(-num_positions // self.block_size)
        appended = [pool.allocate(max(0, needed - len(table))) for table, pool in zip(request.blocks, self.pools)]
        for table, blocks in zip(request.blocks, appended):
            table.extend(blocks)
        request.block_capacity = min(map(len, request.blocks)) * self.block_size
        return appended

    def confirm(self, request: Request) -> None:
        """After ``num_confirmed`` grew: offer full blocks to the prefix cache, give back what left the window.

        Steps in the air start at ``num_confirmed`` or later, so they read nothing of what is given back.
        """
        full = request.num_confirmed // self.block_size
        if self._prefix_caching and full > request.num_remembered:
            self._extend_chain(request, full)
            for pool, table in zip(self.pools, request.blocks):
                for index in range(request.num_remembered, full):
                    pool.remember(table[index], request.digests[index])
            self._sketch.filled(request.digests, request.num_remembered, full)
            request.num_remembered = full
        for group in self._windowed:
            keep_from = max(0, request.num_confirmed - self._windows[group] + 1) // self.block_size
            done = request.num_trimmed[group]
            if keep_from > done:
                table = request.blocks[group]
                self.pools[group].release(table[done:keep_from])
                table[done:keep_from] = [NULL_BLOCK] * (keep_from - done)
                request.num_trimmed[group] = keep_from

    def release(self, request: Request) -> None:
        """Take back all blocks of ``request``. Only when no step in the air names them."""
        self._sketch.ended(request.digests, request.num_remembered)
        for pool, table in zip(self.pools, request.blocks):
            pool.release(table)
        request.blocks = []
        request.block_capacity = 0

    def reset(self) -> None:
        """Forget all cached prefixes; requests keep their blocks."""
        for pool in self.pools:
            pool.forget_all()

    def prefix_marks(self) -> bytes:
        """What the prefix cache holds, as ``EngineStats.prefix_marks``."""
        return self._sketch.marks()

    def _extend_chain(self, request: Request, num_blocks: int) -> None:
        salt = request.cache_salt
        extend_chain(request.digests, request.token_ids, num_blocks, self.block_size, salt, adapter=request.adapter)

    def _hit_blocks(self, request: Request, group: int, num_hit: int) -> list[int]:
        """The table entries of the first ``num_hit`` blocks: cached ones, null ones before the window."""
        pool = self.pools[group]
        window = self._window_blocks[group]
        start = max(0, num_hit - window) if window else 0
        found = (pool.find(digest) for digest in request.digests[start:num_hit])
        return [NULL_BLOCK] * start + [block for block in found if block is not None]
