"""Rows to the ranks of their experts and back, one kernel each way: write into the peers' memory, then meet.

``table``: the addresses of all ranks' regions (``region``, a RowsRegion), of the errors, and a time limit. A program
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
    region: tl.constexpr,
    hidden: tl.constexpr,
    choices: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    moves: tl.constexpr,
) -> None:
    """Write each of ``count`` rows of ``x`` to the ranks that own one of its experts, and its experts there to all.

    Without ``moves`` the rows are there already. This rank's rows begin at ``first`` of those of all ranks; an item is
    ``rows`` of them. ``receivers`` [count] gets a bit for each rank that a row goes to. ``choices`` is the
    region's ``top_k`` or the next power of two.
    """
    world: tl.constexpr = region.world_size
    top_k: tl.constexpr = region.top_k
    program = tl.program_id(0)
    number = next_number(sequence, program)
    item_bytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    choice = tl.arange(0, choices)
    item = program
    if program == 0:
        for peer in tl.static_range(world):
            senders = (tl.load(table + peer) + region.senders_at).to(receivers.dtype)
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
            tl.store((base + region.ids_at).to(ids.dtype) + there, tl.where(owner == peer, expert, -1), mask=chosen)
            tl.store((base + region.weights_at).to(weights.dtype) + there, weight, mask=chosen)
            goes_to |= tl.max((owner == peer).to(tl.int32), axis=1) << peer
        tl.store(receivers + token, goes_to, mask=present)
        for column in tl.static_range(0, hidden if moves else 0, block):
            at = column + tl.arange(0, block)
            held = present[:, None] & (at < hidden)[None, :]
            values = tl.load(x + token.to(tl.int64)[:, None] * hidden + at[None, :], mask=held, other=0.0)
            for peer in tl.static_range(world):
                theirs = vectors_at(tl.load(table + peer), x) + region.rows_at // item_bytes
                wanted = ((goes_to >> peer) & 1) != 0
                tl.store(theirs + place[:, None] * hidden + at[None, :], values, mask=held & wanted[:, None])
        item += tl.num_programs(0)
    meet(table, rank, number, program, 0, world, max_programs)
    finish(sequence, program, number, max_programs)


@triton.jit
def send_back(
    table: tl.tensor,
    mine: tl.tensor,
    partial: tl.tensor,
    receivers: tl.tensor,
    rank: tl.tensor,
    items: tl.tensor,
    choice: tl.tensor,
    region: tl.constexpr,
    hidden: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write what this rank has made of rows back to their ranks, but for its own rows; see ``combine_rows``.

    ``mine`` is the address of this rank's region; ``choice`` counts the experts of a row.
    """
    world: tl.constexpr = region.world_size
    top_k: tl.constexpr = region.top_k
    item_bytes: tl.constexpr = partial.dtype.element_ty.primitive_bitwidth // 8
    senders = (mine + region.senders_at).to(receivers.dtype)
    item = tl.program_id(0)
    while item < items:
        token = item * rows + tl.arange(0, rows)
        for source in tl.static_range(world):
            row = (tl.load(senders + 2 * source) + token).to(tl.int64)
            # What this rank has made itself it reads where it is.
            present = token < tl.where(rank == source, 0, tl.load(senders + 2 * source + 1))
            chosen = present[:, None] & (choice < top_k)[None, :]
            pair = row[:, None] * top_k + choice[None, :]
            here = tl.load((mine + region.ids_at).to(receivers.dtype) + pair, mask=chosen, other=-1)
            wanted = tl.max(here, axis=1) >= 0
            theirs = vectors_at(tl.load(table + source), partial) + region.returned_at // item_bytes
            place = rank.to(tl.int64) * region.max_tokens + token
            for column in tl.static_range(0, hidden, block):
                at = column + tl.arange(0, block)
                held = wanted[:, None] & (at < hidden)[None, :]
                values = tl.load(partial + row[:, None] * hidden + at[None, :], mask=held, other=0.0)
                tl.store(theirs + place[:, None] * hidden + at[None, :], values, mask=held)
        item += tl.num_programs(0)


@triton.jit
def add_up(
    mine: tl.tensor,
    partial: tl.tensor,
    receivers: tl.tensor,
    out: tl.tensor,
    rank: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    items: tl.tensor,
    region: tl.constexpr,
    hidden: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``out`` = what has come back of this rank's rows, and what it has made of them; see ``combine_rows``."""
    world: tl.constexpr = region.world_size
    item_bytes: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    own = partial.to(tl.int64) + first.to(tl.int64) * (hidden * item_bytes)
    item = tl.program_id(0)
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
                came = mine + (region.returned_at + peer * region.max_tokens * hidden * item_bytes)
                values = vectors_at(tl.where(rank == peer, own, came), out)
                wanted = ((went_to >> peer) & 1) != 0
                total += tl.load(values + place, mask=held & wanted[:, None], other=0.0).to(tl.float32)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=held)
        item += tl.num_programs(0)


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
    region: tl.constexpr,
    hidden: tl.constexpr,
    choices: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    max_programs: tl.constexpr,
    moves: tl.constexpr,
) -> None:
    """Write ``partial`` [R, H] back to where its rows came from; ``out`` = this rank's rows, summed in rank order.

    Without ``moves`` it is there already. What is left out are rows without an expert here. The other arguments are
    those of ``dispatch_rows``.
    """
    world: tl.constexpr = region.world_size
    program = tl.program_id(0)
    number = next_number(sequence, program)
    choice = tl.arange(0, choices)
    mine = tl.load(table + rank)
    sent = items if moves else 0
    send_back(table, mine, partial, receivers, rank, sent, choice, region, hidden, rows, block)
    meet(table, rank, number, program, 0, world, max_programs)
    add_up(mine, partial, receivers, out, rank, first, count, items, region, hidden, rows, block)
    finish(sequence, program, number, max_programs)
