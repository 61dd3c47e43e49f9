"""Kernels of elementwise functions, and the tanh that they share. fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.ordering import wait_for_predecessor


@triton.jit
def tanh(x):
    """tanh of fp32, to a few units of the last place."""
    square = x * x
    # Near zero the quotient below cancels; the series is exact to fp32 there.
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu (exact) or gelu_tanh of fp32."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        result = 0.5 * x * (1.0 + tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))
    return result


@triton.jit
def gated_rows(
    gate_up_ptr,
    out_ptr,
    row_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[row] = act(first WIDTH of the row) * the rest; grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = gate_up_ptr + row * row_stride + columns
    wait_for_predecessor(EARLY)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    out = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def soft_cap_rows(logits_ptr, row_stride, width, cap, BLOCK: tl.constexpr):
    """cap * tanh(logits / cap), in place; grid: rows, blocks of columns."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride + columns
    mask = columns < width
    logits = tl.load(at, mask=mask, other=0.0)
    tl.store(at, cap * tanh(logits / cap), mask=mask)
