"""Kernels of reductions over the vocabulary: a row is cut in blocks, one program each, and the last one combines them.

All grids are (blocks of a row, rows); ``counters`` has a zero for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.ordering import last_to_arrive, wait_for_predecessor


@triton.jit
def first_best(scores, columns, width):
    """The largest score and the first column that has it; some column where there is none, as among NaN."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, columns, width - 1), axis=0)


BROKEN = tl.constexpr(1 << 30)
"""Added to the column of a block that has an entry which is not finite; columns are less."""


@triton.jit
def combine_best(
    best,
    at,
    width,
    row,
    best_ptr,
    at_ptr,
    counter_ptr,
    out_ptr,
    codes_ptr,
    CHECKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store the best of this block and its column, and those of the row if this program is its last.

    With CHECKED columns may be marked BROKEN, and codes[row] is the column, or -1 if one of the row is.
    """
    blocks = tl.num_programs(0)
    own = row * blocks + tl.program_id(0)
    tl.store(best_ptr + own, best)
    tl.store(at_ptr + own, at)
    if last_to_arrive(counter_ptr + row, blocks):
        block = tl.arange(0, BLOCKS)
        mask = block < blocks
        bests = tl.load(best_ptr + row * blocks + block, mask=mask, other=float("-inf"), cache_modifier=".cg")
        ats = tl.load(at_ptr + row * blocks + block, mask=mask, other=width - 1, cache_modifier=".cg")
        if CHECKED:
            broken = tl.max(ats, axis=0) >= BROKEN
            _, first = first_best(bests, tl.where(ats >= BROKEN, ats - BROKEN, ats), width)
            tl.store(codes_ptr + row, tl.where(broken, -1, first).to(tl.int64))
        else:
            _, first = first_best(bests, ats, width)
        tl.store(out_ptr + row, first.to(tl.int64))


@triton.jit
def exact_noise(words):
    """Gumbel noise of 32-bit words, as the contract has it: two logarithms in fp64, then rounded."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(words):
    """The same in fp32, within 1e-4."""
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - uniform, without cancellation
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3 + rest * (0.25 + rest * (0.2 + rest * (1.0 / 6))))))
    return -tl.log(tl.where(rest < 0.1, series, -tl.log(uniform)))


@triton.jit
def argmax_rows(
    logits_ptr,
    best_ptr,
    at_ptr,
    counter_ptr,
    out_ptr,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first of the largest logits of each row, int64."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(EARLY)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < width, other=float("-inf"))
    best, at = first_best(logits, columns, width)
    combine_best(best, at, width, row, best_ptr, at_ptr, counter_ptr, out_ptr, out_ptr, False, BLOCKS)


@triton.jit(
    do_not_specialize_on_alignment=["inverse_temperature_ptr", "seeds_ptr", "positions_ptr", "out_ptr", "codes_ptr"]
)
def gumbel_argmax_rows(
    logits_ptr,
    inverse_temperature_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    at_ptr,
    counter_ptr,
    out_ptr,
    codes_ptr,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The argmax of logits * inverse temperature + Gumbel noise; without noise where that is 0. As codes the same,
    but -1 for a row of which some entry is not finite.

    The noise is that of the operators contract: Philox4x32-10 of (entry // 4, position) under the seed. Rough noise
    tells which entry wins, and exact noise is computed for that one; where two are too close, for all of the block.
    Launch without fusion of products and sums, or scores differ from the twin's in the last bit.
    """
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    wait_for_predecessor(EARLY)
    present = columns < width
    scores = tl.load(logits_ptr + row * row_stride + columns, mask=present, other=float("-inf"))
    # NaN is not below either.
    broken = tl.max((present & ~(tl.abs(scores) < float("inf"))).to(tl.int32), axis=0)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    best, at = first_best(scores, columns, width)
    if inverse_temperature > 0:
        groups = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        zero = groups * 0
        word_0, word_1, word_2, word_3 = tl.philox(seed, groups, zero + position, zero, zero)
        words = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
        scores = scores * inverse_temperature
        rough = scores + rough_noise(words)
        top = tl.max(rough, axis=0)
        near = rough >= top - (3e-4 + tl.abs(top) * 1e-6)
        if tl.sum(near.to(tl.int32), axis=0) == 1:
            at = tl.max(tl.where(near, columns, 0), axis=0)
            score = tl.max(tl.where(near, scores, float("-inf")), axis=0)
            word = tl.max(tl.where(near, words, 0), axis=0)
            best = score + exact_noise(word)
        else:
            best, at = first_best(scores + exact_noise(words), columns, width)
    at += broken * BROKEN
    combine_best(best, at, width, row, best_ptr, at_ptr, counter_ptr, out_ptr, codes_ptr, True, BLOCKS)


@triton.jit
def log_normalizer_rows(
    logits_ptr,
    top_ptr,
    sum_ptr,
    counter_ptr,
    out_ptr,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """log(sum(exp(logits))) of each row, fp32."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(EARLY)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < width, other=float("-inf"))
    top = tl.max(logits, axis=0)
    # A block of nothing but -inf has no sum; -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    own = row * blocks + tl.program_id(0)
    tl.store(top_ptr + own, top)
    tl.store(sum_ptr + own, tl.sum(tl.exp(logits - shift), axis=0))
    if last_to_arrive(counter_ptr + row, blocks):
        block = tl.arange(0, BLOCKS)
        mask = block < blocks
        tops = tl.load(top_ptr + row * blocks + block, mask=mask, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(sum_ptr + row * blocks + block, mask=mask, other=0.0, cache_modifier=".cg")
        highest = tl.max(tops, axis=0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(out_ptr + row, shift + tl.log(tl.sum(sums * tl.exp(tops - shift), axis=0)))
