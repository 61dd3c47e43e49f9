"""The size and behaviour of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fourfold.errors import ConfigError

MAX_BLOCKS: Final = 2**31 - 1
"""Of one pool: block tables hold 32-bit numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens a block."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache of a rank; default: what --gpu-memory-utilization leaves, on a CPU 1 GiB at most."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations and cache may take together."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Keys and values as the model has them, or in fp8 (e4m3, a scale for each token and head), which takes half."""
    num_blocks: int | None = None
    """Blocks in each pool, in place of a size in bytes."""
    prefix_caching: bool = True
    """Whether requests share the blocks of equal prompt starts."""

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"--block-size is {self.block_size}; one of 8, 16, 32, 64, 128")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ConfigError(f"--kv-cache-memory is {self.kv_cache_memory}; a number of bytes above 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; above 0, up to 1")
        if self.num_blocks is not None and not 2 <= self.num_blocks <= MAX_BLOCKS:
            raise ConfigError(f"--num-blocks is {self.num_blocks}; from 2 to {MAX_BLOCKS}")
