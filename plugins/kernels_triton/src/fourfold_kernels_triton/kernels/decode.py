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
def combine_splits(
    sums_ptr,
    stats_ptr,
    first,
    active,
    group,
    dims,
    GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """[GROUP, PADDED_DIM]: the attention that ``active`` splits from number ``first`` on make together."""
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
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: kv heads, sequences, splits. Sequences with another number of new tokens than one are left alone.

    GROUP is the most query heads of a kv head, a power of two; ROWS is that or what a matrix product needs; GROUP_SIZE
    is what all kv heads have, 0 where they differ. ALL: every sequence has one token. The new token's key and value
    come from the fused row, not from the cache: the program of the last split writes them there.
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
    rows = tl.arange(0, ROWS)
    one = tl.arange(0, 1)
    dims = tl.arange(0, PADDED_DIM)
    held = dims < HEAD_DIM
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token + one)
    row_start = token.to(tl.int64) * qkv_stride
    key_start = row_start + (NUM_HEADS + kv_head) * HEAD_DIM + one
    value_at = qkv_ptr + (key_start + NUM_KV_HEADS * HEAD_DIM)[:, None] + dims[None, :]
    value = tl.load(value_at, mask=held[None, :], other=0.0)
    query_starts = row_start + (first_head + rows) * HEAD_DIM
    q_own, q_other, q_weight, q_other_weight, q_cos, q_sin = fetch_heads(
        qkv_ptr,
        query_starts,
        rows < group_size,
        query_weight_ptr,
        cos_sin_ptr,
        position + rows * 0,
        NORM,
        ROTARY,
        HEAD_DIM,
        PADDED_DIM,
    )
    k_own, k_other, k_weight, k_other_weight, k_cos, k_sin = fetch_heads(
        qkv_ptr,
        key_start,
        one == 0,
        key_weight_ptr,
        cos_sin_ptr,
        position + one * 0,
        NORM,
        ROTARY,
        HEAD_DIM,
        PADDED_DIM,
    )

    cached = length - 1
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = low // TILE
    stop_tile = tl.cdiv(cached, TILE)
    tiles = tl.maximum(stop_tile - first_tile, 0)
    active = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), min_tiles)), 1)
    per_split = tl.cdiv(tiles, active)
    if split >= active:
        return
    query = turn_heads(
        q_own,
        q_other,
        q_weight,
        q_other_weight,
        q_cos,
        q_sin,
        epsilon,
        weight_offset,
        NORM,
        ROTARY,
        HEAD_DIM,
        PADDED_DIM,
    )
    key = turn_heads(
        k_own,
        k_other,
        k_weight,
        k_other_weight,
        k_cos,
        k_sin,
        epsilon,
        weight_offset,
        NORM,
        ROTARY,
        HEAD_DIM,
        PADDED_DIM,
    )

    # The new token: the first of the running softmax of the last split.
    own = one + split == active - 1
    key, value = keep(
        cache_ptr,
        scales_ptr,
        slot,
        kv_head,
        key,
        value.to(tl.float32),
        own & (slot >= 0),
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        PADDED_DIM,
        SCALED,
    )
    fresh = scaled(tl.sum(query * key, axis=1), scale, soft_cap, SOFT_CAP)
    top = tl.where(own, fresh, float("-inf"))
    weight = tl.where(own, 1.0, 0.0) + tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32) + tl.where(own[:, None], value, 0.0)

    query = as_factor(query, qkv_ptr, SCALED)
    reach = cached + rows * 0
    sequence_table = table_ptr + sequence.to(tl.int64) * table_stride
    start = first_tile + split * per_split
    stop = tl.minimum(start + per_split, stop_tile)
    # Tiles of which every token is there and seen, then those at the ends.
    whole_start = tl.cdiv(low, TILE)
    whole_stop = cached // TILE
    whole_from = tl.maximum(start, whole_start) * TILE
    whole_to = tl.minimum(stop, whole_stop) * TILE
    top, weight, acc = attend_tiles(
        query,
        top,
        weight,
        acc,
        cache_ptr,
        scales_ptr,
        sequence_table,
        whole_from,
        whole_to,
        cached,
        reach,
        kv_head,
        scale,
        soft_cap,
        False,
        SOFT_CAP,
        WINDOW,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        SCALED,
        TILE,
        PRECISION,
    )
    end_from = tl.maximum(start, whole_stop) * TILE
    top, weight, acc = attend_tiles(
        query,
        top,
        weight,
        acc,
        cache_ptr,
        scales_ptr,
        sequence_table,
        end_from,
        stop * TILE,
        cached,
        reach,
        kv_head,
        scale,
        soft_cap,
        True,
        SOFT_CAP,
        WINDOW,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        SCALED,
        TILE,
        PRECISION,
    )
    if WINDOW > 0:
        begin_to = tl.minimum(tl.minimum(stop, whole_start), whole_stop) * TILE
        top, weight, acc = attend_tiles(
            query,
            top,
            weight,
            acc,
            cache_ptr,
            scales_ptr,
            sequence_table,
            start * TILE,
            begin_to,
            cached,
            reach,
            kv_head,
            scale,
            soft_cap,
            True,
            SOFT_CAP,
            WINDOW,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            SCALED,
            TILE,
            PRECISION,
        )

    out_at = out_ptr + token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + first_head * HEAD_DIM
    if not SPLIT or active == 1:
        out = (acc / weight[:, None]).to(out_ptr.dtype.element_ty)
        out_mask = (rows < group_size)[:, None] & held[None, :]
        tl.store(out_at + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=out_mask)
    elif SPLIT:
        pair = sequence * NUM_KV_HEADS + kv_head
        first = pair.to(tl.int64) * splits
        kept_rows = (first + split) * GROUP + rows
        kept_mask = rows < GROUP
        tl.store(stats_ptr + kept_rows * 2, top, mask=kept_mask)
        tl.store(stats_ptr + kept_rows * 2 + 1, weight, mask=kept_mask)
        tl.store(sums_ptr + kept_rows[:, None] * PADDED_DIM + dims[None, :], acc, mask=kept_mask[:, None])
        if last_to_arrive(counter_ptr + pair, active):
            group = tl.arange(0, GROUP)
            AT_ONCE: tl.constexpr = 4096 // (GROUP * PADDED_DIM) if GROUP * PADDED_DIM < 4096 else 1
            whole = combine_splits(sums_ptr, stats_ptr, first, active, group, dims, GROUP, PADDED_DIM, AT_ONCE)
            whole_at = out_at + group[:, None] * HEAD_DIM + dims[None, :]
            whole_mask = (group < group_size)[:, None] & held[None, :]
            tl.store(whole_at, whole.to(out_ptr.dtype.element_ty), mask=whole_mask)
