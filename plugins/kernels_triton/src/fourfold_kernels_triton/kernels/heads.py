"""The device functions that read heads of the fused query, key and value rows: normalised, then rotated.

In two halves, so that a kernel can ask for all that it needs before it waits for the first of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_heads(qkv_ptr, starts, present, weight_ptr, cos_sin_ptr, positions, SHAPE: tl.constexpr):
    """What ``turn_heads`` takes: the heads, their turning partners, the weights of both, cosines and sines.

    ``starts`` int64 [N] are the first elements of the heads, ``positions`` int64 [N] their tokens' positions,
    ``present`` [N] which are read at all; others are zero. ``cos_sin`` is [positions, rotary]: cosines, then sines.
    """
    ROTARY: tl.constexpr = SHAPE.rotary
    dims = tl.arange(0, SHAPE.padded_dim)
    held = dims < SHAPE.head_dim
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
    if SHAPE.norm:
        weight = tl.load(weight_ptr + dims, mask=held, other=0.0)
    if ROTARY > 0:
        other = tl.load(qkv_ptr + starts[:, None] + partner[None, :], mask=mask, other=0.0)
        if SHAPE.norm:
            other_weight = tl.load(weight_ptr + partner, mask=held, other=0.0)
        turning = present[:, None] & (dims < ROTARY)[None, :]
        at = cos_sin_ptr + positions[:, None] * ROTARY + tl.where(dims < HALF, dims, dims - HALF)[None, :]
        cos = tl.load(at, mask=turning, other=1.0)
        sin = tl.load(at + HALF, mask=turning, other=0.0)
    return own, other, weight, other_weight, cos, sin


@triton.jit
def turn_heads(fetched, epsilon, weight_offset, SHAPE: tl.constexpr):
    """fp32 [N, padded_dim], holding values of the dtype of the rows, as if both steps had gone through memory."""
    own, other, weight, other_weight, cos, sin = fetched
    dims = tl.arange(0, SHAPE.padded_dim)
    x = own.to(tl.float32)
    y = other.to(tl.float32)
    if SHAPE.norm:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SHAPE.head_dim + epsilon)[:, None]
        x = (x * inverse * (weight.to(tl.float32) + weight_offset)[None, :]).to(own.dtype).to(tl.float32)
        y = (y * inverse * (other_weight.to(tl.float32) + weight_offset)[None, :]).to(own.dtype).to(tl.float32)
    if SHAPE.rotary > 0:
        x = (x * cos + y * tl.where(dims < SHAPE.rotary // 2, -sin, sin)).to(own.dtype).to(tl.float32)
    return x
