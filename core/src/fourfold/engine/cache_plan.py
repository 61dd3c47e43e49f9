"""From what the ranks report to the size of the KV cache: groups of layers, and the blocks that every rank can hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fourfold.config.cache_config import CacheConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.engine.kv_cache_manager import blocks_for, request_capacity
from fourfold.errors import ConfigError, EngineError
from fourfold.messages import WorkerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """The cache that all ranks allocate."""

    cache: KVCacheConfig
    bytes_per_rank: int
    """On the rank that holds most."""
    tokens: int
    """Positions that fit, over all requests."""


def plan_cache(workers: Sequence[WorkerInfo], config: CacheConfig, *, max_model_len: int) -> CachePlan:
    """Size the cache by the rank with the fewest blocks; ``--num-blocks`` and ``--kv-cache-memory`` go first.

    Raises ConfigError when one request of ``max_model_len`` tokens would not fit, and for a cache that is larger than a
    rank's memory.
    """
    specs = {
        info.rank: {layer: msgspec.convert(spec, KVCacheSpec) for layer, spec in info.kv_cache_specs.items()}
        for info in workers
    }
    block_bytes = {rank: sum(spec.bytes_per_block for spec in layers.values()) for rank, layers in specs.items()}
    groups = _group_layers(specs.values())
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        # Every engine of ranks that have one each must come to the same number, whatever its own option is.
        num_blocks = min(
            min(config.kv_cache_memory or info.available_bytes, info.available_bytes) // block_bytes[info.rank]
            for info in workers
            if block_bytes[info.rank]
        )
    fullest = max(block_bytes.values())
    for info in workers:
        _check_memory(info, num_blocks * block_bytes[info.rank])
    cache = KVCacheConfig(groups=groups, num_blocks=num_blocks)
    _check_one_fits(cache, max_model_len, fullest, by_number=config.num_blocks is not None)
    return CachePlan(
        cache=cache,
        bytes_per_rank=num_blocks * fullest,
        tokens=(num_blocks - 1) * groups[0].spec.block_size,
    )


def _group_layers(ranks: Iterable[Mapping[int, KVCacheSpec]]) -> tuple[KVCacheGroup, ...]:
    """Layers of equal block size and window share a group. Stages hold different layers, and ranks of a layer may
    hold parts of different size: neither changes which blocks a request has.
    """
    layers: dict[int, KVCacheSpec] = {}
    for specs in ranks:
        for layer, spec in specs.items():
            known = layers.get(layer, spec)
            if (known.block_size, known.sliding_window) != (spec.block_size, spec.sliding_window):
                raise EngineError(f"ranks disagree on the cache of layer {layer}: {known} and {spec}")
            layers[layer] = max(known, spec, key=lambda one: one.bytes_per_block)
    groups: dict[tuple[int, int], list[int]] = {}
    for layer, spec in sorted(layers.items()):
        groups.setdefault((spec.block_size, spec.sliding_window), []).append(layer)
    return tuple(
        KVCacheGroup(
            spec=max((layers[layer] for layer in group), key=lambda one: one.bytes_per_block), layers=tuple(group)
        )
        for group in groups.values()
    )


def _check_memory(info: WorkerInfo, wanted: int) -> None:
    # Pages take memory only once they are touched: without this, the kernel would end the process in the middle.
    if info.memory_bytes is not None and wanted > info.memory_bytes:
        raise ConfigError(
            f"the KV cache would take {wanted} bytes, and rank {info.rank} has {info.memory_bytes} bytes of memory on "
            f"{info.device}; lower --kv-cache-memory or --num-blocks"
        )


def _check_one_fits(cache: KVCacheConfig, max_model_len: int, block_bytes: int, *, by_number: bool) -> None:
    capacity = request_capacity(cache) if cache.num_blocks > 1 else 0
    if capacity is None or capacity >= max_model_len:
        return
    needed = blocks_for(cache.groups, max_model_len)
    shorter = f", or --max-model-len {capacity} or less" if capacity >= 2 else ""
    more = f"--num-blocks {needed}" if by_number else f"--kv-cache-memory {needed * block_bytes} (bytes a rank)"
    raise ConfigError(
        f"a request of {max_model_len} tokens needs {needed} KV cache blocks and there are {cache.num_blocks}; give "
        f"{more} or more{shorter}"
    )
