"""The device functions that take a tile of cached tokens into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.pages import SCALE_BYTES, page_size
from fourfold_kernels_triton.kernels.scores import scaled


@triton.jit
def as_factor(query, qkv_ptr, SHAPE: tl.constexpr):
    """fp32 in the dtype of the rows, as a factor of products with the cache.

    e4m3 becomes fp16 in one instruction for two values, and bfloat16 by way of fp32.
    """
    if SHAPE.scaled and qkv_ptr.dtype.element_ty == tl.bfloat16:
        result = query.to(tl.float16)
    else:
        result = query.to(qkv_ptr.dtype.element_ty)
    return result


@triton.jit
def load_scales(scales_ptr, pages, tokens, present, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """fp32 scales of the rows of ``tokens`` in ``pages``; ``scales_ptr`` is the cache as fp32."""
    at = scales_ptr + (pages + SHAPE.block_size * SHAPE.head_dim) // SCALE_BYTES + tokens % SHAPE.block_size
    return tl.load(at, mask=present, other=0.0) if MASKED else tl.load(at)


@triton.jit
def locate_tile(context, tokens, present, kv_head, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """Where the keys [padded_dim, tokens] and values [tokens, padded_dim] lie, and the pages of both."""
    cache_ptr, _, table_ptr = context
    dims = tl.arange(0, SHAPE.padded_dim)
    if MASKED:
        blocks = tl.load(table_ptr + tokens // SHAPE.block_size, mask=present, other=0)
    else:
        blocks = tl.load(table_ptr + tokens // SHAPE.block_size)
    size = page_size(SHAPE)
    pages = (blocks.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * (2 * size)
    row = tokens % SHAPE.block_size
    keys_at = cache_ptr + (pages + row * SHAPE.head_dim)[None, :] + dims[:, None]
    if SHAPE.scaled:
        values_at = cache_ptr + (pages + size + row)[:, None] + dims[None, :] * SHAPE.block_size
    else:
        values_at = cache_ptr + (pages + size + row * SHAPE.head_dim)[:, None] + dims[None, :]
    return keys_at, values_at, pages


@triton.jit
def attend_tile(
    query,
    state,
    context,
    start,
    length,
    reach,
    kv_head,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tokens from ``start`` on, of which the cache has ``length``; ``reach`` is each row's own position.

    ``context`` is the cache, its scales and the sequence's block table; ``state`` is (top, weight, acc) of the running
    softmax, and what is returned. Unmasked, all rows see all of the tile.
    """
    top, weight, acc = state
    scales_ptr = context[1]
    held = tl.arange(0, SHAPE.padded_dim) < SHAPE.head_dim
    tokens = start + tl.arange(0, TILE)
    present = tokens < length
    keys_at, values_at, pages = locate_tile(context, tokens, present, kv_head, MASKED, SHAPE)
    if MASKED or SHAPE.head_dim != SHAPE.padded_dim:
        keys = tl.load(keys_at, mask=present[None, :] & held[:, None], other=0.0)
    else:
        keys = tl.load(keys_at)
    products = tl.dot(query, keys.to(query.dtype), input_precision=SHAPE.precision)
    if SHAPE.scaled:
        products *= load_scales(scales_ptr, pages, tokens, present, MASKED, SHAPE)[None, :]
    scores = scaled(products, scale, soft_cap, SHAPE.soft_cap)
    if MASKED:
        visible = present[None, :] & (tokens[None, :] <= reach[:, None])
        if SHAPE.window > 0:
            visible = visible & (tokens[None, :] > reach[:, None] - SHAPE.window)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no largest score; -inf - -inf would be NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    chances = tl.exp2(scores - shift[:, None])
    left = tl.exp2(top - shift)
    weight = weight * left + tl.sum(chances, axis=1)
    if SHAPE.scaled:
        chances *= load_scales(scales_ptr, pages + page_size(SHAPE), tokens, present, MASKED, SHAPE)[None, :]
    if MASKED or SHAPE.head_dim != SHAPE.padded_dim:
        values = tl.load(values_at, mask=present[:, None] & held[None, :], other=0.0)
    else:
        values = tl.load(values_at)
    acc = tl.dot(chances.to(query.dtype), values.to(query.dtype), acc * left[:, None], input_precision=SHAPE.precision)
    return highest, weight, acc


@triton.jit
def attend_tiles(
    query,
    state,
    context,
    start,
    stop,
    length,
    reach,
    kv_head,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """``attend_tile`` from token ``start`` to before ``stop``."""
    top, weight, acc = state
    for first in range(start, stop, TILE):
        state = (top, weight, acc)
        top, weight, acc = attend_tile(
            query, state, context, first, length, reach, kv_head, scale, soft_cap, MASKED, SHAPE, TILE
        )
    return top, weight, acc
