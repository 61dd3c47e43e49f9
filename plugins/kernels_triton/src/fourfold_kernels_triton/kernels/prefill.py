"""The kernel of prompts and their chunks: several new tokens a sequence, which its paged context holds already."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.heads import fetch_heads, turn_heads
from fourfold_kernels_triton.kernels.tiles import as_factor, attend_tiles


@triton.jit
def find_sequence(query_start_ptr, block, num_sequences, TOKENS: tl.constexpr):
    """The sequence of a block of TOKENS query tokens: the last s with query_start[s] // TOKENS + s <= block.

    So sequence s has room for ceil(length / TOKENS) blocks, and the blocks of all are found without a table.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TOKENS + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["table_stride", "num_sequences"],
    # Integers that are read one by one: where their tensors start must not make another kernel.
    do_not_specialize_on_alignment=["query_start_ptr", "lengths_ptr", "table_ptr", "positions_ptr", "first_head_ptr"],
)
def attend_prompts(
    qkv_ptr,
    out_ptr,
    cache_ptr,
    scales_ptr,
    query_start_ptr,
    lengths_ptr,
    table_ptr,
    positions_ptr,
    cos_sin_ptr,
    first_head_ptr,
    query_weight_ptr,
    qkv_stride,
    table_stride,
    num_sequences,
    scale,
    soft_cap,
    epsilon,
    weight_offset,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: T // TOKENS + S blocks of queries, kv heads. Sequences of one new token are left alone.

    A row of the tile is a token and a query head: TOKENS tokens, ``group`` heads of one kv head each.
    """
    ROWS: tl.constexpr = TOKENS * SHAPE.group
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    # Late blocks see the longest context: they start first, so that none is left alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(query_start_ptr, block, num_sequences, TOKENS)
    first_token = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - first_token
    first_query = (block - first_token // TOKENS - sequence) * TOKENS
    if first_query >= count or count == 1:
        return
    length = tl.load(lengths_ptr + sequence)
    computed = length - count
    first_head = tl.load(first_head_ptr + kv_head)
    group_size = tl.load(first_head_ptr + kv_head + 1) - first_head
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // SHAPE.group
    present = (queries < count) & (rows % SHAPE.group < group_size)
    tokens = first_token + queries
    positions = tl.load(positions_ptr + tokens, mask=present, other=0)
    heads = first_head + rows % SHAPE.group
    starts = tokens.to(tl.int64) * qkv_stride + heads * SHAPE.head_dim
    fetched = fetch_heads(qkv_ptr, starts, present, query_weight_ptr, cos_sin_ptr, positions, SHAPE)
    query = as_factor(turn_heads(fetched, epsilon, weight_offset, SHAPE), qkv_ptr, SHAPE)
    reach = computed + queries
    stop = tl.minimum(computed + first_query + TOKENS, length)
    low = tl.maximum(computed + first_query - SHAPE.window + 1, 0) // TILE * TILE if SHAPE.window > 0 else 0
    context = (cache_ptr, scales_ptr, table_ptr + sequence.to(tl.int64) * table_stride)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    state = (top, weight, acc)
    if SHAPE.window == 0:
        # Tiles that lie before the block's first query are seen whole by every row.
        whole = (computed + first_query) // TILE * TILE
        state = attend_tiles(
            query, state, context, low, whole, length, reach, kv_head, scale, soft_cap, False, SHAPE, TILE
        )
        low = whole
    top, weight, acc = attend_tiles(
        query, state, context, low, stop, length, reach, kv_head, scale, soft_cap, True, SHAPE, TILE
    )
    dims = tl.arange(0, PADDED_DIM)
    out_at = out_ptr + (tokens.to(tl.int64) * SHAPE.num_heads + heads)[:, None] * SHAPE.head_dim + dims[None, :]
    mask = present[:, None] & (dims < SHAPE.head_dim)[None, :]
    # Rows that are not there have seen nothing.
    out = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
