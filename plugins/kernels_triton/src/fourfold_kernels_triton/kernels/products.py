"""The kernel of a matrix times one row, which a decode step of one request is made of: weights in one stream."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.ordering import wait_for_predecessor


@triton.jit
def vector_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [OUT] = weight [OUT, IN] @ x [IN] + bias; fp32 inside. A program makes OUTS outputs, COLUMNS of IN a time.

    The first columns of the weight are asked for before ``x`` is there.
    """
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    at = weight_ptr + outs.to(tl.int64)[:, None] * IN + columns[None, :]
    present = (outs < OUT)[:, None]
    weight = tl.load(at, mask=present & (columns < IN)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + columns, mask=columns < IN, other=0.0)
    acc = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    for first in tl.static_range(COLUMNS, IN, COLUMNS):
        held = first + columns < IN
        weight = tl.load(at + first, mask=present & held[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + first + columns, mask=held, other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + outs, mask=outs < OUT, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, out.to(out_ptr.dtype.element_ty), mask=outs < OUT)
