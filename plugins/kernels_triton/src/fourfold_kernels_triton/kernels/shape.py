"""What does not change between the attention kernels of one layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A single compile-time constant of a kernel; its fields are that too."""

    norm: bool
    """Query and key heads are normalised before they are rotated."""
    rotary: int
    """Dimensions of a head that are rotated, its first ones."""
    num_heads: int
    num_kv_heads: int
    group: int
    """The most query heads of a kv head, the next power of two."""
    head_dim: int
    padded_dim: int
    """``head_dim``, the next power of two."""
    block_size: int
    """Tokens of a block of the cache."""
    scaled: bool
    """The cache is e4m3 with a scale a row."""
    soft_cap: bool
    window: int
    """Tokens that a query sees, itself included; 0: all."""
    precision: str
    """Of products of fp32; 16-bit ones do not ask."""
