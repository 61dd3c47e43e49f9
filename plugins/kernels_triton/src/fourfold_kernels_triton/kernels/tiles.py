"""The device functions that take a tile of cached tokens into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.pages import SCALE_BYTES, page_size
from fourfold_kernels_triton.kernels.scores import scaled


@triton.jit
def as_factor(query, qkv_ptr, SCALED: tl.constexpr):
    """fp32 in the dtype of the rows, as a factor of products with the cache.

    e4m3 becomes fp16 in one instruction for two values, and bfloat16 by way of fp32.
    """
    if SCALED and qkv_ptr.dtype.element_ty == tl.bfloat16:
        result = query.to(tl.float16)
    else:
        result = query.to(qkv_ptr.dtype.element_ty)
    return result


@triton.jit
def load_scales(
    scales_ptr, pages, tokens, present, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """fp32 scales of the rows of ``tokens`` in ``pages``; ``scales_ptr`` is the cache as fp32."""
    at = scales_ptr + (pages + BLOCK_SIZE * HEAD_DIM) // SCALE_BYTES + tokens % BLOCK_SIZE
    return tl.load(at, mask=present, other=0.0) if MASKED else tl.load(at)


@triton.jit
def attend_tile(
    query,
    top,
    weight,
    acc,
    cache_ptr,
    scales_ptr,
    table_ptr,
    start,
    length,
    reach,
    kv_head,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens from ``start`` on, of which the cache has ``length``; ``reach`` is each row's own position.

    Unmasked, all rows see all of the tile. Returns (top, weight, acc) of the softmax.
    """
    dims = tl.arange(0, PADDED_DIM)
    held = dims < HEAD_DIM
    tokens = start + tl.arange(0, TILE)
    present = tokens < length
    if MASKED:
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0)
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE)
    size = page_size(BLOCK_SIZE, HEAD_DIM, SCALED)
    pages = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * (2 * size)
    row = tokens % BLOCK_SIZE
    keys_at = cache_ptr + (pages + row * HEAD_DIM)[None, :] + dims[:, None]
    if SCALED:
        values_at = cache_ptr + (pages + size + row)[:, None] + dims[None, :] * BLOCK_SIZE
    else:
        values_at = cache_ptr + (pages + size + row * HEAD_DIM)[:, None] + dims[None, :]
    if MASKED or HEAD_DIM != PADDED_DIM:
        keys = tl.load(keys_at, mask=present[None, :] & held[:, None], other=0.0)
    else:
        keys = tl.load(keys_at)
    products = tl.dot(query, keys.to(query.dtype), input_precision=PRECISION)
    if SCALED:
        products *= load_scales(scales_ptr, pages, tokens, present, MASKED, BLOCK_SIZE, HEAD_DIM)[None, :]
    scores = scaled(products, scale, soft_cap, SOFT_CAP)
    if MASKED:
        visible = present[None, :] & (tokens[None, :] <= reach[:, None])
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > reach[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no largest score; -inf - -inf would be NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    chances = tl.exp2(scores - shift[:, None])
    left = tl.exp2(top - shift)
    weight = weight * left + tl.sum(chances, axis=1)
    if SCALED:
        chances *= load_scales(scales_ptr, pages + size, tokens, present, MASKED, BLOCK_SIZE, HEAD_DIM)[None, :]
    if MASKED or HEAD_DIM != PADDED_DIM:
        values = tl.load(values_at, mask=present[:, None] & held[None, :], other=0.0)
    else:
        values = tl.load(values_at)
    acc = tl.dot(chances.to(query.dtype), values.to(query.dtype), acc * left[:, None], input_precision=PRECISION)
    return highest, weight, acc


@triton.jit
def attend_tiles(
    query,
    top,
    weight,
    acc,
    cache_ptr,
    scales_ptr,
    table_ptr,
    start,
    stop,
    length,
    reach,
    kv_head,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``attend_tile`` from token ``start`` to before ``stop``."""
    for first in range(start, stop, TILE):
        top, weight, acc = attend_tile(
            query,
            top,
            weight,
            acc,
            cache_ptr,
            scales_ptr,
            table_ptr,
            first,
            length,
            reach,
            kv_head,
            scale,
            soft_cap,
            MASKED,
            SOFT_CAP,
            WINDOW,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            SCALED,
            TILE,
            PRECISION,
        )
    return top, weight, acc
