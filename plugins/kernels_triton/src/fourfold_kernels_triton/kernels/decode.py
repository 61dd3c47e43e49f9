"""The kernel of a decode step: one new token a sequence, from the fused rows to the attended heads in one launch.

The context of a sequence is cut over several programs; the last of them combines what they found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.heads import fetch_heads, turn_heads
from fourfold_kernels_triton.kernels.ordering import last_to_arrive, wait_for_predecessor
from fourfold_kernels_triton.kernels.pages import keep
from fourfold_kernels_triton.kernels.scores import scaled
from fourfold_kernels_triton.kernels.tiles import as_factor, attend_tiles


@triton.jit
def combine_splits(sums_ptr, stats_ptr, first, active, group, dims, SHAPE: tl.constexpr):
    """[group, padded_dim]: the attention that ``active`` splits from number ``first`` on make together."""
    GROUP: tl.constexpr = SHAPE.group
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    AT_ONCE: tl.constexpr = 4096 // (GROUP * PADDED_DIM) if GROUP * PADDED_DIM < 4096 else 1
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, PADDED_DIM), tl.float32)
    for start in range(0, active, AT_ONCE):
        splits = start + tl.arange(0, AT_ONCE)
        rows = (first + splits)[:, None] * GROUP + group[None, :]
        present = (splits < active)[:, None] & (group < GROUP)[None, :]
        tops = tl.load(stats_ptr + rows * 2, mask=present, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stats_ptr + rows * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
        at = sums_ptr + rows[:, :, None] * PADDED_DIM + dims[None, None, :]
        sums = tl.load(at, mask=present[:, :, None], other=0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, axis=0))
        factors = tl.exp2(tops - highest[None, :])
        left = tl.exp2(top - highest)
        weight = weight * left + tl.sum(weights * factors, axis=0)
        acc = acc * left[:, None] + tl.sum(sums * factors[:, :, None], axis=0)
        top = highest
    return acc / weight[:, None]


@triton.jit
def share_context(cached, low, split, splits, min_tiles, TILE: tl.constexpr):
    """How many programs share the tiles from token ``low`` to ``cached``, and the tiles of number ``split``."""
    first_tile = low // TILE
    stop_tile = tl.cdiv(cached, TILE)
    tiles = tl.maximum(stop_tile - first_tile, 0)
    active = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), min_tiles)), 1)
    per_split = tl.cdiv(tiles, active)
    start = first_tile + split * per_split
    return active, start, tl.minimum(start + per_split, stop_tile)


@triton.jit
def attend_share(
    query,
    state,
    context,
    start,
    stop,
    cached,
    low,
    reach,
    kv_head,
    scale,
    soft_cap,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tiles from ``start`` to before ``stop``: those of which every token is there and seen, then the ends."""
    whole_start = tl.cdiv(low, TILE)
    whole_stop = cached // TILE
    whole_from = tl.maximum(start, whole_start) * TILE
    whole_to = tl.minimum(stop, whole_stop) * TILE
    state = attend_tiles(
        query, state, context, whole_from, whole_to, cached, reach, kv_head, scale, soft_cap, False, SHAPE, TILE
    )
    end_from = tl.maximum(start, whole_stop) * TILE
    state = attend_tiles(
        query, state, context, end_from, stop * TILE, cached, reach, kv_head, scale, soft_cap, True, SHAPE, TILE
    )
    if SHAPE.window > 0:
        begin_to = tl.minimum(tl.minimum(stop, whole_start), whole_stop) * TILE
        state = attend_tiles(
            query, state, context, start * TILE, begin_to, cached, reach, kv_head, scale, soft_cap, True, SHAPE, TILE
        )
    return state


@triton.jit
def store_share(
    state,
    out_at,
    sums_ptr,
    stats_ptr,
    counter_ptr,
    pair,
    split,
    splits,
    active,
    group_size,
    SPLIT: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Write the attended heads to ``out_at``, if this program is the only one or the last of its pair to arrive."""
    top, weight, acc = state
    rows = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, SHAPE.padded_dim)
    held = dims < SHAPE.head_dim
    if not SPLIT or active == 1:
        out = (acc / weight[:, None]).to(out_at.dtype.element_ty)
        out_mask = (rows < group_size)[:, None] & held[None, :]
        tl.store(out_at + rows[:, None] * SHAPE.head_dim + dims[None, :], out, mask=out_mask)
    elif SPLIT:
        first = pair.to(tl.int64) * splits
        kept_rows = (first + split) * SHAPE.group + rows
        kept_mask = rows < SHAPE.group
        tl.store(stats_ptr + kept_rows * 2, top, mask=kept_mask)
        tl.store(stats_ptr + kept_rows * 2 + 1, weight, mask=kept_mask)
        tl.store(sums_ptr + kept_rows[:, None] * SHAPE.padded_dim + dims[None, :], acc, mask=kept_mask[:, None])
        if last_to_arrive(counter_ptr + pair, active):
            group = tl.arange(0, SHAPE.group)
            whole = combine_splits(sums_ptr, stats_ptr, first, active, group, dims, SHAPE)
            whole_at = out_at + group[:, None] * SHAPE.head_dim + dims[None, :]
            whole_mask = (group < group_size)[:, None] & held[None, :]
            tl.store(whole_at, whole.to(out_at.dtype.element_ty), mask=whole_mask)


@triton.jit(
    do_not_specialize=["table_stride", "splits", "min_tiles"],
    # Integers that are read one by one: where their tensors start must not make another kernel.
    do_not_specialize_on_alignment=[
        "counter_ptr",
        "query_start_ptr",
        "lengths_ptr",
        "table_ptr",
        "slots_ptr",
        "positions_ptr",
        "first_head_ptr",
    ],
)
def attend_decodes(
    qkv_ptr,
    out_ptr,
    cache_ptr,
    scales_ptr,
    sums_ptr,
    stats_ptr,
    counter_ptr,
    query_start_ptr,
    lengths_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    first_head_ptr,
    query_weight_ptr,
    key_weight_ptr,
    qkv_stride,
    table_stride,
    splits,
    min_tiles,
    scale,
    soft_cap,
    epsilon,
    weight_offset,
    SHAPE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: kv heads, sequences, splits. Sequences with another number of new tokens than one are left alone.

    ROWS is the group or what a matrix product needs; GROUP_SIZE is what all kv heads have, 0 where they differ. ALL:
    every sequence has one token. The new token's key and value come from the fused row, not from the cache: the
    program of the last split writes them there.
    """
    wait_for_predecessor(EARLY)
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # A program is short, and its time is that of one load after the other: all are asked for as early as can be.
    length = tl.load(lengths_ptr + sequence)
    if ALL:
        token = sequence
    else:
        token = tl.load(query_start_ptr + sequence)
        if tl.load(query_start_ptr + sequence + 1) - token != 1:
            return
    if GROUP_SIZE > 0:
        first_head = kv_head * GROUP_SIZE
        group_size = GROUP_SIZE
    else:
        first_head = tl.load(first_head_ptr + kv_head)
        group_size = tl.load(first_head_ptr + kv_head + 1) - first_head
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    rows = tl.arange(0, ROWS)
    one = tl.arange(0, 1)
    dims = tl.arange(0, PADDED_DIM)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token + one)
    row_start = token.to(tl.int64) * qkv_stride
    key_start = row_start + (SHAPE.num_heads + kv_head) * SHAPE.head_dim + one
    value_at = qkv_ptr + (key_start + SHAPE.num_kv_heads * SHAPE.head_dim)[:, None] + dims[None, :]
    value = tl.load(value_at, mask=(dims < SHAPE.head_dim)[None, :], other=0.0)
    starts = row_start + (first_head + rows) * SHAPE.head_dim
    positions = position + rows * 0
    fetched = fetch_heads(qkv_ptr, starts, rows < group_size, query_weight_ptr, cos_sin_ptr, positions, SHAPE)
    fetched_key = fetch_heads(qkv_ptr, key_start, one == 0, key_weight_ptr, cos_sin_ptr, position + one * 0, SHAPE)

    cached = length - 1
    low = tl.maximum(length - SHAPE.window, 0) if SHAPE.window > 0 else 0
    active, start, stop = share_context(cached, low, split, splits, min_tiles, TILE)
    if split >= active:
        return
    query = turn_heads(fetched, epsilon, weight_offset, SHAPE)
    key = turn_heads(fetched_key, epsilon, weight_offset, SHAPE)

    # The new token: the first of the running softmax of the last split.
    own = one + split == active - 1
    written = own & (slot >= 0)
    key, value = keep(cache_ptr, scales_ptr, slot, kv_head, key, value.to(tl.float32), written, SHAPE)
    fresh = scaled(tl.sum(query * key, axis=1), scale, soft_cap, SHAPE.soft_cap)
    top = tl.where(own, fresh, float("-inf"))
    weight = tl.where(own, 1.0, 0.0) + tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32) + tl.where(own[:, None], value, 0.0)

    query = as_factor(query, qkv_ptr, SHAPE)
    reach = cached + rows * 0
    context = (cache_ptr, scales_ptr, table_ptr + sequence.to(tl.int64) * table_stride)
    state = (top, weight, acc)
    state = attend_share(query, state, context, start, stop, cached, low, reach, kv_head, scale, soft_cap, SHAPE, TILE)
    out_at = out_ptr + token.to(tl.int64) * (SHAPE.num_heads * SHAPE.head_dim) + first_head * SHAPE.head_dim
    pair = sequence * SHAPE.num_kv_heads + kv_head
    store_share(state, out_at, sums_ptr, stats_ptr, counter_ptr, pair, split, splits, active, group_size, SPLIT, SHAPE)
