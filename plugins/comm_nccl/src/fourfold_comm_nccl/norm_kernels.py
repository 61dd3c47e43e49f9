"""Sums over the ranks that end in a residual sum and an RMS norm: one launch, and the sum is never written.

A program has whole rows. Every intermediate is rounded as if it had been stored: the sum, then the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_comm_nccl.all_reduce_kernels import slot_of
from fourfold_comm_nccl.signal_kernels import finish, meet, next_number


@triton.jit
def add_and_normalize(
    total: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
) -> None:
    """residual[row] += total; out[row] = rms norm of that, times weight."""
    at = row.to(tl.int64) * width + columns
    before = tl.load(residual + at, mask=inside, other=0.0)
    after = (before.to(tl.float32) + total.to(before.dtype).to(tl.float32)).to(before.dtype)
    tl.store(residual + at, after, mask=inside)
    wide = after.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * tl.rsqrt(mean + epsilon) * scale).to(before.dtype), mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])
def one_shot_add_norm(
    table: tl.tensor,
    sequence: tl.tensor,
    tensor: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    rows: tl.tensor,
    epsilon: tl.tensor,
    world: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    slots_at: tl.constexpr,
    slot_bytes: tl.constexpr,
) -> None:
    """As ``one_shot_all_reduce``; ``block`` elements hold a row."""
    program = tl.program_id(0)
    number = next_number(sequence, program)
    columns = tl.arange(0, block)
    inside = columns < width
    mine = slot_of(table, rank, slots_at, number, slot_bytes, tensor)
    row = program
    while row < rows:
        tl.store(
            mine + row * width + columns, tl.load(tensor + row * width + columns, mask=inside, other=0.0), mask=inside
        )
        row += tl.num_programs(0)
    meet(table, rank, number, program, 0, world, max_programs)
    row = program
    while row < rows:
        total = tl.zeros([block], tl.float32)
        for peer in tl.static_range(world):
            theirs = slot_of(table, peer, slots_at, number, slot_bytes, tensor)
            total += tl.load(theirs + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        add_and_normalize(total, residual, weight, out, row, columns, inside, epsilon, width)
        row += tl.num_programs(0)
    finish(sequence, program, number, max_programs)


@triton.jit
def add_norm(
    tensor: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The rest of the work where ``tensor`` is summed already: a program a row."""
    row = tl.program_id(0)
    columns = tl.arange(0, block)
    total = tl.load(tensor + row.to(tl.int64) * width + columns, mask=columns < width, other=0.0)
    add_and_normalize(total, residual, weight, out, row, columns, columns < width, epsilon, width)
