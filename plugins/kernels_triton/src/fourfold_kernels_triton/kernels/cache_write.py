"""The kernel that writes the keys and values of a step into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.heads import fetch_heads, turn_heads
from fourfold_kernels_triton.kernels.pages import keep


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def write_cache(
    qkv_ptr,
    cache_ptr,
    scales_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    weight_ptr,
    qkv_stride,
    num_tokens,
    epsilon,
    weight_offset,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Keys normalised and rotated, values as they are; grid: blocks of TOKENS tokens, kv heads."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    present = tokens < num_tokens
    slots = tl.load(slots_ptr + tokens, mask=present, other=-1)
    positions = tl.load(positions_ptr + tokens, mask=present, other=0)
    written = slots >= 0
    starts = tokens.to(tl.int64) * qkv_stride + (SHAPE.num_heads + kv_head) * SHAPE.head_dim
    heads = fetch_heads(qkv_ptr, starts, written, weight_ptr, cos_sin_ptr, positions, SHAPE)
    dims = tl.arange(0, SHAPE.padded_dim)
    mask = written[:, None] & (dims < SHAPE.head_dim)[None, :]
    values = tl.load(
        qkv_ptr + (starts + SHAPE.num_kv_heads * SHAPE.head_dim)[:, None] + dims[None, :], mask=mask, other=0.0
    )
    keys = turn_heads(heads, epsilon, weight_offset, SHAPE)
    keep(cache_ptr, scales_ptr, slots, kv_head, keys, values.to(tl.float32), written, SHAPE)
