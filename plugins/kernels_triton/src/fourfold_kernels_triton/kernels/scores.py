"""Device functions that every attention kernel shares: where cached tokens lie, and what a score is."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.activations import tanh


@triton.jit
def cached_rows(
    table_ptr,
    tokens,
    present,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """int64 first elements of the keys of ``tokens`` of one sequence; the values lie BLOCK_SIZE * HEAD_DIM further.

    The cache is [blocks, kv heads, keys and values, BLOCK_SIZE, HEAD_DIM]. The table is followed where ``present``.
    """
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    return ((blocks * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE) + tokens % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def scaled(products, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores in base 2: what tl.exp2 takes where the softmax is written with exp."""
    if SOFT_CAP:
        scores = (soft_cap * 1.4426950408889634) * tanh(products * (scale / soft_cap))  # 1 / ln(2)
    else:
        scores = products * (scale * 1.4426950408889634)
    return scores
