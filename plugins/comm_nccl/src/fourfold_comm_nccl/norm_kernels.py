"""Sums over the ranks that end in a residual sum and an RMS norm: one launch, and the sum is never written.

A program has whole rows. Every intermediate is rounded as if it had been stored: the sum, then the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_comm_nccl.all_reduce_kernels import received, slot_of
from fourfold_comm_nccl.signal_kernels import finish, meet, next_number, send_words


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
    """residual[row] += total; out[row] = rms norm of that, times weight. ``columns`` has any shape."""
    at = row.to(tl.int64) * width + columns
    before = tl.load(residual + at, mask=inside, other=0.0)
    after = (before.to(tl.float32) + total.to(before.dtype).to(tl.float32)).to(before.dtype)
    tl.store(residual + at, after, mask=inside)
    wide = after.to(tl.float32)
    mean = tl.sum(tl.ravel(wide * wide), axis=0) / width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * tl.rsqrt(mean + epsilon) * scale).to(before.dtype), mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])
def flagged_add_norm(
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
    flagged_at: tl.constexpr,
    slot_bytes: tl.constexpr,
    source_bytes: tl.constexpr,
) -> None:
    """As ``flagged_all_reduce``; ``block`` words hold a row."""
    program = tl.program_id(0)
    number = next_number(sequence, program)
    values: tl.constexpr = 64 // tensor.dtype.element_ty.primitive_bitwidth
    area = flagged_at + (number & 1).to(tl.int64) * slot_bytes + rank.to(tl.int64) * source_bytes
    place = tl.arange(0, block)
    inside = place < width // values
    row = program
    while row < rows:
        words = row * (width // values) + place
        word = tl.load(tensor.to(tl.pointer_type(tl.int64), bitcast=True) + words, mask=inside, other=0)
        for peer in tl.static_range(world):
            send_words(tl.load(table + peer) + area + words.to(tl.int64) * 16, word, inside, number)
        row += tl.num_programs(0)
    columns = place[:, None] * values + tl.arange(0, values)[None, :]
    row = program
    while row < rows:
        words = row * (width // values) + place
        total = received(table, rank, words, inside, number, tensor, world, flagged_at, slot_bytes, source_bytes)
        add_and_normalize(total, residual, weight, out, row, columns, columns < width, epsilon, width)
        row += tl.num_programs(0)
    finish(sequence, program, number, max_programs)


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
