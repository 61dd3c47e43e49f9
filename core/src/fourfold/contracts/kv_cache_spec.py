"""What one layer asks of the paged KV cache. Layers of equal spec share a group: one block table, one pool."""

from __future__ import annotations

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one attention layer on one rank."""

    block_size: int
    """Tokens a block."""
    bytes_per_block: int
    """Keys and values of one layer for one block on this rank."""
    sliding_window: int = 0
    """Only the last ``sliding_window`` tokens are ever read; 0: all."""


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of equal spec."""

    spec: KVCacheSpec
    layers: tuple[int, ...]
    """Layer numbers of the whole model."""


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cache as the engine sized it, sent to every rank."""

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    """Blocks in each group's pool, block 0 included, which is never handed out (padding writes there)."""
