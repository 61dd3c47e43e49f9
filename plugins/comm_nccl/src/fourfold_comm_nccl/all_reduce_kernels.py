"""Sums over the ranks, one kernel each; on every rank in rank order and in fp32, so that all get the same bits.

``table``: the addresses of all ranks' regions (``region.Region``), of the errors, and a time limit. Tensors are
multiples of 16 bytes. ``out`` may be ``tensor``: a program reads and writes the same elements. After the one-shot and
two-shot kernels of vLLM and PyTorch, with the input copied by the kernel itself and one meeting less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_comm_nccl.signal_kernels import finish, meet, next_number


@triton.jit
def slot_of(
    table: tl.tensor, peer: tl.tensor, offset: tl.tensor, number: tl.tensor, slot_bytes: tl.constexpr, like: tl.tensor
) -> tl.tensor:
    """A pointer, of the type of ``like``, to ``offset`` bytes into a rank's region, or as far into the other slot."""
    address = tl.load(table + peer) + offset + (number & 1).to(tl.int64) * slot_bytes
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit(do_not_specialize=["rank", "vectors"])
def one_shot_all_reduce(
    table: tl.tensor,
    sequence: tl.tensor,
    tensor: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    vectors: tl.tensor,
    world: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    slots_at: tl.constexpr,
    slot_bytes: tl.constexpr,
) -> None:
    """Copy into the own slot, meet once, read all ranks' slots. Moves (world - 1) times the tensor into every rank."""
    program = tl.program_id(0)
    number = next_number(sequence, program)
    # A product, which tells the compiler that it is a multiple of a vector: masks then leave vectors whole.
    count = vectors * (128 // tensor.dtype.element_ty.primitive_bitwidth)
    mine = slot_of(table, rank, slots_at, number, slot_bytes, tensor)
    start = program * block
    while start < count:
        at = start + tl.arange(0, block)
        tl.store(mine + at, tl.load(tensor + at, mask=at < count, other=0.0), mask=at < count)
        start += tl.num_programs(0) * block
    meet(table, rank, number, program, 0, world, max_programs)
    start = program * block
    while start < count:
        at = start + tl.arange(0, block)
        total = tl.zeros([block], tl.float32)
        for peer in tl.static_range(world):
            theirs = slot_of(table, peer, slots_at, number, slot_bytes, tensor)
            total += tl.load(theirs + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
        start += tl.num_programs(0) * block
    finish(sequence, program, number, max_programs)


@triton.jit(do_not_specialize=["rank", "vectors"])
def two_shot_all_reduce(
    table: tl.tensor,
    sequence: tl.tensor,
    tensor: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    vectors: tl.tensor,
    world: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    slots_at: tl.constexpr,
    slot_bytes: tl.constexpr,
    part_bytes: tl.constexpr,
    results_at: tl.constexpr,
) -> None:
    """Push stripes to the ranks that sum them, meet, push the sums to all, meet, copy out.

    A superblock is one block for each rank to sum. Moves 2 (world - 1) / world times the tensor into every rank.
    """
    program = tl.program_id(0)
    number = next_number(sequence, program)
    count = vectors * (128 // tensor.dtype.element_ty.primitive_bitwidth)
    first = program * block * world
    step = tl.num_programs(0) * block * world
    lane = tl.arange(0, block)
    start = first
    while start < count:
        for peer in tl.static_range(world):
            at = start + peer * block + lane
            parts = slot_of(table, peer, slots_at + rank.to(tl.int64) * part_bytes, number, slot_bytes, tensor)
            tl.store(parts + start // world + lane, tl.load(tensor + at, mask=at < count, other=0.0), mask=at < count)
        start += step
    meet(table, rank, number, program, 0, world, max_programs)
    start = first
    while start < count:
        at = start + rank * block + lane
        total = tl.zeros([block], tl.float32)
        for peer in tl.static_range(world):
            parts = slot_of(table, rank, slots_at + peer * part_bytes, number, slot_bytes, tensor)
            total += tl.load(parts + start // world + lane, mask=at < count, other=0.0).to(tl.float32)
        rounded = total.to(tensor.dtype.element_ty)
        for peer in tl.static_range(world):
            results = slot_of(table, peer, slots_at + results_at, number, slot_bytes, tensor)
            tl.store(results + at, rounded, mask=at < count)
        start += step
    meet(table, rank, number, program, 1, world, max_programs)
    results = slot_of(table, rank, slots_at + results_at, number, slot_bytes, tensor)
    start = first
    while start < count:
        for peer in tl.static_range(world):
            at = start + peer * block + lane
            tl.store(out + at, tl.load(results + at, mask=at < count, other=0.0), mask=at < count)
        start += step
    finish(sequence, program, number, max_programs)


@triton.jit(do_not_specialize=["rank"])
def meet_all(
    table: tl.tensor,
    sequence: tl.tensor,
    rank: tl.tensor,
    world: tl.constexpr,
    max_programs: tl.constexpr,
) -> None:
    """One program that returns when every rank's has come, and moves nothing."""
    program = tl.program_id(0)
    number = next_number(sequence, program)
    meet(table, rank, number, program, 0, world, max_programs)
    finish(sequence, program, number, max_programs)
