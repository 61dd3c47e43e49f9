"""The kernels of a matrix times one row or a few, which small decode steps are made of: weights in one stream."""

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
    """out [OUT] = weight [OUT, IN] @ x [IN] + bias; fp32 inside. A program makes OUTS outputs, COLUMNS weights at a time.

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


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [num_rows, OUT] = x [num_rows, IN] @ weight [OUT, IN] transposed + bias, for up to ROWS rows.

    A program makes OUTS outputs of all rows; the first columns of the weight are asked for before ``x`` is there.
    """
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    weight_at = weight_ptr + outs.to(tl.int64)[:, None] * IN + columns[None, :]
    x_at = x_ptr + rows[None, :] * x_stride + columns[:, None]
    present = (outs < OUT)[:, None]
    given = (rows < num_rows)[None, :]
    weight = tl.load(weight_at, mask=present & (columns < IN)[None, :], other=0.0)
    wait_for_predecessor(EARLY)
    x = tl.load(x_at, mask=given & (columns < IN)[:, None], other=0.0)
    acc = tl.dot(weight, x)
    for first in range(COLUMNS, IN, COLUMNS):
        held = first + columns < IN
        weight = tl.load(weight_at + first, mask=present & held[None, :], other=0.0)
        x = tl.load(x_at + first, mask=given & held[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    if BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < OUT, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + rows[None, :] * OUT + outs[:, None], acc.to(out_ptr.dtype.element_ty), mask=present & given)
