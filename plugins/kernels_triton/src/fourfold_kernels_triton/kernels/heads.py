"""The device function that reads heads of the fused query, key and value rows: normalised, then rotated."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_heads(
    qkv_ptr,
    starts,
    present,
    weight_ptr,
    epsilon,
    weight_offset,
    cos_sin_ptr,
    positions,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """fp32 [N, PADDED_DIM], holding values of the dtype of ``qkv``, as if both steps had gone through memory.

    ``starts`` int64 [N] are the first elements of the heads, ``positions`` int64 [N] their tokens' positions,
    ``present`` [N] which are read at all; others are zero. ``cos_sin`` is [positions, ROTARY]: cosines, then sines.
    """
    dims = tl.arange(0, PADDED_DIM)
    mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    own = tl.load(qkv_ptr + starts[:, None] + dims[None, :], mask=mask, other=0.0)
    x = own.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)[:, None]
        weight = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32) + weight_offset
        x = (x * inverse * weight[None, :]).to(own.dtype).to(tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        # Dimension d turns with d + HALF, which another thread may hold: it is read once more, from the first cache.
        partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROTARY, dims - HALF, dims))
        other = tl.load(qkv_ptr + starts[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            turned_weight = tl.load(weight_ptr + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            other = (other * inverse * (turned_weight + weight_offset)[None, :]).to(own.dtype).to(tl.float32)
        angle = tl.where(dims < HALF, dims, dims - HALF)
        turning = present[:, None] & (dims < ROTARY)[None, :]
        at = cos_sin_ptr + positions[:, None] * ROTARY + angle[None, :]
        cos = tl.load(at, mask=turning, other=1.0)
        sin = tl.load(at + HALF, mask=turning, other=0.0)
        x = (x * cos + other * tl.where(dims < HALF, -sin, sin)).to(own.dtype).to(tl.float32)
    return x
