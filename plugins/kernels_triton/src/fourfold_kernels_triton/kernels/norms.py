"""Kernels of the norms: one program a row, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.ordering import wait_for_predecessor


@triton.jit
def rms_norm_rows(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    epsilon,
    weight_offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[row] = x[row] / rms(x[row]) * (weight + weight_offset); rows of ``out`` are dense."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + epsilon) * weight
    tl.store(out_ptr + row * WIDTH + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    epsilon,
    weight_offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """residual[row] += x[row], rounded; then x[row] = the rms norm of that. Both in place."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x_at = x_ptr + row * x_stride + columns
    residual_at = residual_ptr + row * residual_stride + columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    wait_for_predecessor(EARLY)
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    rounded = (x + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, rounded, mask=mask)
    total = rounded.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / WIDTH + epsilon) * weight
    tl.store(x_at, normed.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def head_rms_norm_rows(
    qkv_ptr,
    weight_ptr,
    qkv_stride,
    epsilon,
    weight_offset,
    FIRST_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The norm of heads ``FIRST_HEAD`` to ``FIRST_HEAD + NUM_HEADS - 1`` of a row, in place; ``HEADS`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    at = qkv_ptr + row * qkv_stride + ((FIRST_HEAD + heads) * HEAD_DIM)[:, None] + columns[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32) + weight_offset
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)
    tl.store(at, (x * inverse[:, None] * weight[None, :]).to(qkv_ptr.dtype.element_ty), mask=mask)
