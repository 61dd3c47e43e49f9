"""Device functions of the paged cache: where a token's key and value lie, and what is kept of them.

The cache is [blocks, kv heads, keys and values, block_size * head_dim]. With ``scaled`` it holds e4m3, each block of
keys or values of a head is followed by the scales of its rows, in fp32, and values lie [head_dim, block_size]:
products would take single bytes from where tokens are not next to each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE_BYTES = tl.constexpr(4)


@triton.jit
def page_size(SHAPE: tl.constexpr):
    """Elements of one block of keys, or of values, of one head."""
    return SHAPE.block_size * (SHAPE.head_dim + SCALE_BYTES) if SHAPE.scaled else SHAPE.block_size * SHAPE.head_dim


@triton.jit
def kept(rows, cache_ptr, SCALED: tl.constexpr):
    """fp32 [N, D] as the cache keeps it: values in its dtype, and their scales [N], 1 without SCALED."""
    if SCALED:
        largest = tl.max(tl.abs(rows), axis=1)
        scales = tl.where(largest > 0, largest / 448.0, 1.0)  # the largest of e4m3
        # Rounding the quotient up must not leave the range.
        values = tl.minimum(tl.maximum(rows / scales[:, None], -448.0), 448.0)
    else:
        values = rows
        scales = tl.full((rows.shape[0],), 1.0, tl.float32)
    return values.to(cache_ptr.dtype.element_ty), scales


@triton.jit
def keep(cache_ptr, scales_ptr, slots, kv_head, keys, values, written, SHAPE: tl.constexpr):
    """Write fp32 keys and values [N, padded_dim] of one head to ``slots`` int64 [N] where ``written``.

    Returns both in fp32 as they will be read.
    """
    dims = tl.arange(0, SHAPE.padded_dim)
    mask = written[:, None] & (dims < SHAPE.head_dim)[None, :]
    size = page_size(SHAPE)
    pages = (slots // SHAPE.block_size * SHAPE.num_kv_heads + kv_head) * (2 * size)
    row = slots % SHAPE.block_size
    kept_keys, key_scales = kept(keys, cache_ptr, SHAPE.scaled)
    kept_values, value_scales = kept(values, cache_ptr, SHAPE.scaled)
    at = cache_ptr + (pages + row * SHAPE.head_dim)[:, None] + dims[None, :]
    tl.store(at, kept_keys, mask=mask)
    if not SHAPE.scaled:
        tl.store(at + size, kept_values, mask=mask)
    else:
        values_at = cache_ptr + (pages + size + row)[None, :] + dims[:, None] * SHAPE.block_size
        tl.store(values_at, tl.trans(kept_values), mask=(dims < SHAPE.head_dim)[:, None] & written[None, :])
        scales_at = scales_ptr + (pages + SHAPE.block_size * SHAPE.head_dim) // SCALE_BYTES + row
        tl.store(scales_at, key_scales, mask=written)
        tl.store(scales_at + size // SCALE_BYTES, value_scales, mask=written)
    return kept_keys.to(tl.float32) * key_scales[:, None], kept_values.to(tl.float32) * value_scales[:, None]
