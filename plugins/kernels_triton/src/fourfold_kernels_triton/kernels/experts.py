"""Kernels of a layer of experts: pairs of a row and an expert are brought in order, multiplied, and summed by row.

R is rows, K experts a row; pair p is row p // K and its choice p % K. Everything is decided on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.activations import activate
from fourfold_kernels_triton.kernels.ordering import wait_for_predecessor


@triton.jit
def order_pairs(
    ids_ptr,
    pairs_ptr,
    experts_ptr,
    starts_ptr,
    counts_ptr,
    total_ptr,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Pairs by expert, and the experts that have any: place i is experts[i], with counts[i] pairs from starts[i] on.

    Grid: experts, each of which finds its own pairs and counts those of all. BINS is a power of two above NUM_EXPERTS;
    the last bin takes pairs without an expert.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    wait_for_predecessor(EARLY)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        counts += tl.histogram(tl.where(ids < 0, BINS - 1, ids), BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    start = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    place = tl.sum(((bins < expert) & (counts > 0)).to(tl.int32), axis=0)
    if expert == NUM_EXPERTS - 1:
        tl.store(total_ptr, tl.sum((counts > 0).to(tl.int32), axis=0))
    if count > 0:
        tl.store(experts_ptr + place, expert)
        tl.store(starts_ptr + place, start)
        tl.store(counts_ptr + place, count)
        for first in range(0, num_pairs, BLOCK):
            pairs = first + tl.arange(0, BLOCK)
            mine = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
            found = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(pairs_ptr + start + found - 1, pairs, mask=mine)
            start += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def multiply_pairs(
    x_ptr,
    weight_ptr,
    out_ptr,
    pairs_ptr,
    experts_ptr,
    starts_ptr,
    counts_ptr,
    total_ptr,
    x_stride,
    EACH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[p] = weight[expert of p] @ x[p // EACH]; with GATED weights are [2 OUT, IN], and act(first) * second.

    Grid: blocks of OUTS outputs, places. A program goes through all pairs of its expert, ROWS at a time, so that the
    weights come from memory once.
    """
    place = tl.program_id(1)
    wait_for_predecessor(EARLY)
    if place >= tl.load(total_ptr):
        return
    expert = tl.load(experts_ptr + place).to(tl.int64)
    start = tl.load(starts_ptr + place)
    count = tl.load(counts_ptr + place)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    MATRICES: tl.constexpr = 2 if GATED else 1
    weight_at = weight_ptr + expert * (MATRICES * OUT * IN) + outs[None, :] * IN + columns[:, None]
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        present = rows < count
        pairs = tl.load(pairs_ptr + start + rows, mask=present, other=0).to(tl.int64)
        x_at = x_ptr + (pairs // EACH)[:, None] * x_stride + columns[None, :]
        acc = tl.zeros((ROWS, OUTS), tl.float32)
        second = tl.zeros((ROWS, OUTS), tl.float32)
        for column in range(0, IN, COLUMNS):
            if IN % COLUMNS == 0 and OUT % OUTS == 0:
                x = tl.load(x_at + column, mask=present[:, None], other=0.0)
                weight = tl.load(weight_at + column)
            else:
                held = column + columns < IN
                weight_mask = held[:, None] & (outs < OUT)[None, :]
                x = tl.load(x_at + column, mask=present[:, None] & held[None, :], other=0.0)
                weight = tl.load(weight_at + column, mask=weight_mask, other=0.0)
            acc = tl.dot(x, weight, acc, input_precision=PRECISION)
            if GATED:
                if IN % COLUMNS == 0 and OUT % OUTS == 0:
                    weight = tl.load(weight_at + OUT * IN + column)
                else:
                    weight = tl.load(weight_at + OUT * IN + column, mask=weight_mask, other=0.0)
                second = tl.dot(x, weight, second, input_precision=PRECISION)
        if GATED:
            acc = activate(acc, ACTIVATION) * second
        out_at = out_ptr + pairs[:, None] * OUT + outs[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=present[:, None] & (outs < OUT)[None, :])


@triton.jit
def gather_rows(
    x_ptr,
    pairs_ptr,
    out_ptr,
    num_pairs,
    x_stride,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[i] = x[pairs[i] // EACH]; ``pairs`` int64. Grid: blocks of ROWS pairs, blocks of BLOCK columns."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(EARLY)
    present = places < num_pairs
    rows = tl.load(pairs_ptr + places, mask=present, other=0) // EACH
    mask = present[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
    tl.store(out_ptr + places.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=mask)


@triton.jit
def sum_pairs(
    pairs_ptr,
    places_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[row] = the sum of weight * pair over the row's pairs with an expert; grid: rows, blocks of columns.

    Pair p lies at places[p], without PLACED at p.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(EARLY)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(EACH):
        pair = row * EACH + choice
        held = tl.where(tl.load(ids_ptr + pair) < 0, 0, WIDTH)
        place = tl.load(places_ptr + pair) if PLACED else pair
        values = tl.load(pairs_ptr + place * WIDTH + columns, mask=columns < held, other=0.0)
        acc += values.to(tl.float32) * tl.where(held > 0, tl.load(weights_ptr + pair), 0.0)
    tl.store(out_ptr + row * WIDTH + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)
