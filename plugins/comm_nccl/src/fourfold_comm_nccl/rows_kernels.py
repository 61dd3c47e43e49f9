"""Rows to the ranks of their experts and back, one kernel each way: write into the peers' memory, then meet.

``table``: the addresses of all ranks' regions (``rows_region.RowsRegion``), of the errors, and a time limit. A program
has the same tokens of every rank in both kernels, and meets its like, so that what it needs has come when it goes on;
when a kernel has ended, everything has. Rows are whole vectors of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_comm_nccl.signal_kernels import finish, meet, next_number


@triton.jit
def vectors_at(address: tl.tensor, like: tl.tensor) -> tl.tensor:
    """A pointer of the type of ``like`` to an address of whole vectors, which must not be a sum with a constant.

    The compiler forgets what it is told of such sums: add the constant to the pointer, in elements.
    """
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit(do_not_specialize=["rank", "first", "count", "items"])
def dispatch_rows(
    table: tl.tensor,
    sequence: tl.tensor,
    x: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    owners: tl.tensor,
    receivers: tl.tensor,
    rank: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    items: tl.tensor,
    world: tl.constexpr,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    senders_at: tl.constexpr,
    ids_at: tl.constexpr,
    weights_at: tl.constexpr,
    rows_at: tl.constexpr,
    moves: tl.constexpr,
) -> None:
    """Write each of ``count`` rows of ``x`` to the ranks that own one of its experts, and its experts there to all.

    Without ``moves`` the rows are there already. This rank's rows begin at ``first`` of those of all ranks; an item is
    ``rows`` of them. ``receivers`` [count] gets a bit for each rank that a row goes to. ``choices`` is ``top_k`` or the
    next power of two.
    """
    program = tl.program_id(0)
    number = next_number(sequence, program)
    item_bytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    choice = tl.arange(0, choices)
    item = program
    if program == 0:
        for peer in tl.static_range(world):
            senders = (tl.load(table + peer) + senders_at).to(receivers.dtype)
            tl.store(senders + 2 * rank, first)
            tl.store(senders + 2 * rank + 1, count)
    while item < items:
        token = item * rows + tl.arange(0, rows)
        present = token < count
        chosen = present[:, None] & (choice < top_k)[None, :]
        pair = token[:, None] * top_k + choice[None, :]
        expert = tl.load(ids + pair, mask=chosen, other=-1)
        weight = tl.load(weights + pair, mask=chosen, other=0.0)
        owner = tl.load(owners + expert, mask=expert >= 0, other=-1)
        goes_to = tl.zeros([rows], tl.int32)
        place = (first + token).to(tl.int64)
        there = place[:, None] * top_k + choice[None, :]
        for peer in tl.static_range(world):
            base = tl.load(table + peer)
            tl.store((base + ids_at).to(ids.dtype) + there, tl.where(owner == peer, expert, -1), mask=chosen)
            tl.store((base + weights_at).to(weights.dtype) + there, weight, mask=chosen)
            goes_to |= tl.max((owner == peer).to(tl.int32), axis=1) << peer
        tl.store(receivers + token, goes_to, mask=present)
        for column in tl.static_range(0, hidden if moves else 0, block):
            at = column + tl.arange(0, block)
            held = present[:, None] & (at < hidden)[None, :]
            values = tl.load(x + token.to(tl.int64)[:, None] * hidden + at[None, :], mask=held, other=0.0)
            for peer in tl.static_range(world):
                theirs = vectors_at(tl.load(table + peer), x) + rows_at // item_bytes
                wanted = ((goes_to >> peer) & 1) != 0
                tl.store(theirs + place[:, None] * hidden + at[None, :], values, mask=held & wanted[:, None])
        item += tl.num_programs(0)
    meet(table, rank, number, program, 0, world, max_programs)
    finish(sequence, program, number, max_programs)


@triton.jit(do_not_specialize=["rank", "first", "count", "items"])
def combine_rows(
    table: tl.tensor,
    sequence: tl.tensor,
    partial: tl.tensor,
    receivers: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    items: tl.tensor,
    max_tokens: tl.constexpr,
    world: tl.constexpr,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    senders_at: tl.constexpr,
    ids_at: tl.constexpr,
    returned_at: tl.constexpr,
    moves: tl.constexpr,
) -> None:
    """Write ``partial`` [R, H] back to where its rows came from; ``out`` = this rank's rows, summed in rank order.

    Without ``moves`` it is there already. What is left out are rows without an expert here. The other arguments are
    those of ``dispatch_rows``.
    """
    program = tl.program_id(0)
    number = next_number(sequence, program)
    item_bytes: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    choice = tl.arange(0, choices)
    mine = tl.load(table + rank)
    senders = (mine + senders_at).to(receivers.dtype)
    item = program
    while item < (items if moves else 0):
        token = item * rows + tl.arange(0, rows)
        for source in tl.static_range(world):
            row = (tl.load(senders + 2 * source) + token).to(tl.int64)
            # What this rank has made itself it reads below where it is.
            present = token < tl.where(rank == source, 0, tl.load(senders + 2 * source + 1))
            chosen = present[:, None] & (choice < top_k)[None, :]
            pair = row[:, None] * top_k + choice[None, :]
            here = tl.load((mine + ids_at).to(receivers.dtype) + pair, mask=chosen, other=-1)
            wanted = tl.max(here, axis=1) >= 0
            theirs = vectors_at(tl.load(table + source), out) + returned_at // item_bytes
            place = rank.to(tl.int64) * max_tokens + token
            for column in tl.static_range(0, hidden, block):
                at = column + tl.arange(0, block)
                held = wanted[:, None] & (at < hidden)[None, :]
                values = tl.load(partial + row[:, None] * hidden + at[None, :], mask=held, other=0.0)
                tl.store(theirs + place[:, None] * hidden + at[None, :], values, mask=held)
        item += tl.num_programs(0)
    meet(table, rank, number, program, 0, world, max_programs)
    own = partial.to(tl.int64) + first.to(tl.int64) * (hidden * item_bytes)
    item = program
    while item < items:
        token = item * rows + tl.arange(0, rows)
        present = token < count
        went_to = tl.load(receivers + token, mask=present, other=0)
        for column in tl.static_range(0, hidden, block):
            at = column + tl.arange(0, block)
            held = present[:, None] & (at < hidden)[None, :]
            place = token.to(tl.int64)[:, None] * hidden + at[None, :]
            total = tl.zeros([rows, block], tl.float32)
            for peer in tl.static_range(world):
                came = mine + (returned_at + peer * max_tokens * hidden * item_bytes)
                values = vectors_at(tl.where(rank == peer, own, came), out)
                wanted = ((went_to >> peer) & 1) != 0
                total += tl.load(values + place, mask=held & wanted[:, None], other=0.0).to(tl.float32)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=held)
        item += tl.num_programs(0)
    finish(sequence, program, number, max_programs)
