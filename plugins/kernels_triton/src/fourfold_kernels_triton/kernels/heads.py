"""The device functions that read heads of the fused query, key and value rows: normalised, then rotated.

In two halves, so that a kernel can ask for all that it needs before it waits for the first of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_heads(
    qkv_ptr,
    starts,
    present,
    weight_ptr,
    cos_sin_ptr,
    positions,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """What ``turn_heads`` takes: the heads, their turning partners, the weights of both, cosines and sines.

    ``starts`` int64 [N] are the first elements of the heads, ``positions`` int64 [N] their tokens' positions,
    ``present`` [N] which are read at all; others are zero. ``cos_sin`` is [positions, ROTARY]: cosines, then sines.
    """
    dims = tl.arange(0, PADDED_DIM)
    held = dims < HEAD_DIM
    mask = present[:, None] & held[None, :]
    HALF: tl.constexpr = ROTARY // 2
    # Dimension d turns with d + HALF, which another thread may hold: it is read once more, from the first cache.
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROTARY, dims - HALF, dims))
    own = tl.load(qkv_ptr + starts[:, None] + dims[None, :], mask=mask, other=0.0)
    other = own
    weight = dims
    other_weight = dims
    cos = dims
    sin = dims
    if NORM:
        weight = tl.load(weight_ptr + dims, mask=held, other=0.0)
    if ROTARY > 0:
        other = tl.load(qkv_ptr + starts[:, None] + partner[None, :], mask=mask, other=0.0)
        if NORM:
            other_weight = tl.load(weight_ptr + partner, mask=held, other=0.0)
        turning = present[:, None] & (dims < ROTARY)[None, :]
        at = cos_sin_ptr + positions[:, None] * ROTARY + tl.where(dims < HALF, dims, dims - HALF)[None, :]
        cos = tl.load(at, mask=turning, other=1.0)
        sin = tl.load(at + HALF, mask=turning, other=0.0)
    return own, other, weight, other_weight, cos, sin


@triton.jit
def turn_heads(
    own,
    other,
    weight,
    other_weight,
    cos,
    sin,
    epsilon,
    weight_offset,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """fp32 [N, PADDED_DIM], holding values of the dtype of ``own``, as if both steps had gone through memory."""
    dims = tl.arange(0, PADDED_DIM)
    x = own.to(tl.float32)
    y = other.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)[:, None]
        x = (x * inverse * (weight.to(tl.float32) + weight_offset)[None, :]).to(own.dtype).to(tl.float32)
        y = (y * inverse * (other_weight.to(tl.float32) + weight_offset)[None, :]).to(own.dtype).to(tl.float32)
    if ROTARY > 0:
        x = (x * cos + y * tl.where(dims < ROTARY // 2, -sin, sin)).to(own.dtype).to(tl.float32)
    return x
