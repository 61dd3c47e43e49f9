from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fourfold.config.cache_config import CacheConfig
from fourfold.contracts.kv_cache_spec import KVCacheSpec
from fourfold.engine.cache_plan import plan_cache
from fourfold.errors import ConfigError, EngineError
from fourfold.messages import WorkerInfo


def _worker(rank: int, available: int, layers: dict[int, tuple[int, int]], block_size: int = 16) -> WorkerInfo:
    """``layers``: number -> (bytes a block, window); through msgpack, as a real rank's reply."""
    specs = {
        layer: KVCacheSpec(block_size=block_size, bytes_per_block=size, sliding_window=window)
        for layer, (size, window) in layers.items()
    }
    info = WorkerInfo(
        rank=rank, device="cpu", dtype="float32", available_bytes=available, kv_cache_specs=specs, backends={}
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=WorkerInfo)


def test_layers_of_equal_spec_share_a_group() -> None:
    worker = _worker(0, 10**6, {0: (100, 0), 1: (100, 64), 2: (100, 0), 3: (100, 64)})
    plan = plan_cache([worker], CacheConfig(), max_model_len=64)
    assert [(group.layers, group.spec.sliding_window) for group in plan.cache.groups] == [((0, 2), 0), ((1, 3), 64)]
    assert plan.cache.num_blocks == 10**6 // 400
    assert plan.bytes_per_rank == 2500 * 400
    assert plan.tokens == 2499 * 16


def test_the_rank_with_the_fewest_blocks_decides() -> None:
    stages = [_worker(0, 10_000, {0: (10, 0), 1: (10, 0)}), _worker(1, 9_000, {2: (10, 0), 3: (10, 0), 4: (10, 0)})]
    plan = plan_cache(stages, CacheConfig(), max_model_len=64)
    assert plan.cache.num_blocks == 300
    assert [group.layers for group in plan.cache.groups] == [(0, 1, 2, 3, 4)]
    assert plan.bytes_per_rank == 300 * 30


def test_ranks_may_hold_different_shares_of_a_layer() -> None:
    ranks = [_worker(0, 10_000, {0: (10, 0)}), _worker(1, 10_000, {0: (20, 0)})]
    plan = plan_cache(ranks, CacheConfig(), max_model_len=64)
    assert plan.cache.num_blocks == 500
    assert [(group.layers, group.spec.bytes_per_block) for group in plan.cache.groups] == [((0,), 20)]


def test_ranks_that_see_a_layer_differently_are_refused() -> None:
    ranks = [_worker(0, 10_000, {0: (10, 0)}), _worker(1, 10_000, {0: (10, 64)})]
    with pytest.raises(EngineError, match="ranks disagree on the cache of layer 0"):
        plan_cache(ranks, CacheConfig(), max_model_len=64)


@pytest.mark.parametrize(
    ("config", "num_blocks"), [({}, 100), ({"kv_cache_memory": 5_000}, 50), ({"num_blocks": 7}, 7)]
)
def test_what_the_user_asks_for_goes_first(config: dict[str, Any], num_blocks: int) -> None:
    plan = plan_cache([_worker(0, 10_000, {0: (100, 0)})], CacheConfig(**config), max_model_len=64)
    assert plan.cache.num_blocks == num_blocks


@pytest.mark.parametrize("config", [{"kv_cache_memory": 50}, {"kv_cache_memory": 1_000}, {"num_blocks": 10}])
def test_a_cache_too_small_for_one_request_says_what_would_fit(config: dict[str, Any]) -> None:
    worker = _worker(0, 10_000, {0: (100, 0)})
    with pytest.raises(ConfigError) as caught:
        plan_cache([worker], CacheConfig(**config), max_model_len=256)
    by_number = "num_blocks" in config  # which goes first: a size in bytes beside it would change nothing
    assert ("--num-blocks 17 " if by_number else "--kv-cache-memory 1700 ") in str(caught.value)
    larger = CacheConfig(num_blocks=17) if by_number else CacheConfig(kv_cache_memory=1700)
    assert plan_cache([worker], larger, max_model_len=256).cache.num_blocks == 17
    if by_number:
        assert "--max-model-len 144 or less" in str(caught.value)
        plan_cache([worker], CacheConfig(**config), max_model_len=144)
    if config == {"kv_cache_memory": 50}:
        assert "--max-model-len" not in str(caught.value)


def test_windows_let_any_length_fit() -> None:
    worker = _worker(0, 10_000, {0: (100, 33)})
    plan = plan_cache([worker], CacheConfig(num_blocks=4), max_model_len=10_000)
    assert plan.cache.num_blocks == 4
    with pytest.raises(ConfigError, match="needs 4 KV cache blocks and there are 3"):
        plan_cache([worker], CacheConfig(num_blocks=3), max_model_len=10_000)


def test_ranks_without_layers_need_no_cache() -> None:
    plan = plan_cache([_worker(0, 0, {}), _worker(1, 10_000, {0: (100, 0)})], CacheConfig(), max_model_len=64)
    assert plan.cache.num_blocks == 100


@pytest.mark.parametrize("config", [{"kv_cache_memory": 5_100}, {"num_blocks": 51}])
def test_a_cache_beyond_the_memory_of_a_rank_is_refused(config: dict[str, Any]) -> None:
    workers = [_worker(0, 10_000, {0: (98, 0)}), _worker(1, 10_000, {1: (100, 0)})]
    bounded = [msgspec.structs.replace(worker, memory_bytes=5_000) for worker in workers]
    plan_cache(bounded, CacheConfig(num_blocks=50), max_model_len=64)
    with pytest.raises(
        ConfigError, match=r"5100 bytes, and rank 1 has 5000 .* lower --kv-cache-memory or --num-blocks"
    ):
        plan_cache(bounded, CacheConfig(**config), max_model_len=64)
