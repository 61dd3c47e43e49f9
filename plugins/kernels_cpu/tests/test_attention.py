"""Paged attention against dense fp32 attention; and what its results must not depend on."""

from __future__ import annotations

import pytest
import torch

from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.errors import Unsupported
from fourfold_kernels_cpu.attention import Avx512Attention


class Batch:
    """Sequences with a context already in the cache and some new tokens each, in shuffled blocks."""

    def __init__(self, backend, spec, lengths, block_size=16, garbage=float("nan")):
        self.backend, self.spec, self.block_size = backend, spec, block_size
        self.lengths = lengths  # (context, new) of each sequence
        per_sequence = [-(-(context + new) // block_size) for context, new in lengths]
        num_blocks = sum(per_sequence) + 3
        self.cache = torch.full(backend.kv_cache_shape(num_blocks, block_size), garbage, dtype=torch.bfloat16)
        blocks = torch.randperm(num_blocks).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in per_sequence]
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = [torch.randn(context + new, width).bfloat16() for context, new in lengths]

    def slots(self, sequence, first, last):
        table = self.tables[sequence]
        return [table[i // self.block_size] * self.block_size + i % self.block_size for i in range(first, last)]

    def metadata(self, ranges):
        """``ranges``: (sequence, first, last) of the tokens to compute."""
        starts = [0]
        for _, first, last in ranges:
            starts.append(starts[-1] + last - first)
        ends = [last for _, _, last in ranges]
        table = torch.full((len(ranges), max((len(t) for t in self.tables), default=0) + 1), -7, dtype=torch.int32)
        for row, (sequence, _, last) in enumerate(ranges):
            used = self.tables[sequence][: -(-last // self.block_size)]
            table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        slots = [slot for s, first, last in ranges for slot in self.slots(s, first, last)]
        return AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            sequence_lengths=torch.tensor(ends, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_length=max((last - first for _, first, last in ranges), default=0),
            max_sequence_length=max(ends, default=0),
            query_start_list=starts,
            sequence_lengths_list=ends,
        )

    def run(self, ranges, cos_sin=None):
        rows = [self.qkv[s][first:last] for s, first, last in ranges]
        positions = [torch.arange(first, last) for _, first, last in ranges]
        qkv = torch.cat(rows) if rows else self.qkv[0][:0]
        where = torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)
        return self.backend.rotate_and_attend(qkv.clone(), where, cos_sin, self.cache, self.metadata(ranges))

    def fill(self):
        ranges = [(s, 0, context) for s, (context, _) in enumerate(self.lengths) if context]
        if ranges:
            self.run(ranges)

    def new_ranges(self):
        return [(s, context, context + new) for s, (context, new) in enumerate(self.lengths)]


def reference(spec, qkv, first):
    """Dense attention of tokens ``first`` onwards of one sequence, fp32 [new, heads * head_dim]."""
    total, dim = qkv.shape[0], spec.head_dim
    heads = qkv.float().view(total, -1, dim)
    q = heads[first:, : spec.num_heads]
    k = heads[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]
    v = heads[:, spec.num_heads + spec.num_kv_heads :]
    repeat = torch.tensor(spec.groups)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(first, total)[:, None] - torch.arange(total)[None]
    hidden = distance < 0
    if spec.sliding_window:
        hidden |= distance >= spec.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).reshape(total - first, -1)


def check(batch, got):
    expected = [reference(batch.spec, qkv, context) for qkv, (context, _) in zip(batch.qkv, batch.lengths, strict=True)]
    torch.testing.assert_close(got.float(), torch.cat(expected), rtol=2e-2, atol=1.5e-2)


def make(attention_context, heads=9, kv_heads=3, dim=64, **fields):
    context = attention_context(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, **fields)
    return Avx512Attention(context), context.spec


MIXED = [(0, 1), (15, 1), (16, 1), (300, 1), (0, 17), (0, 200), (130, 150), (127, 2), (500, 1)]


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_mixed_prefill_and_decode(attention_context, dim, heads, kv_heads):
    batch = Batch(*make(attention_context, heads, kv_heads, dim), MIXED)
    batch.fill()
    check(batch, batch.run(batch.new_ranges()))


@pytest.mark.parametrize("group_sizes", [(3, 2), (1, 3), (2,), (1, 30, 64)])
@pytest.mark.parametrize("window", [0, 100])
def test_kv_heads_that_serve_unequally_many(attention_context, group_sizes, window):
    backend, spec = make(
        attention_context, sum(group_sizes), len(group_sizes), group_sizes=group_sizes, sliding_window=window
    )
    batch = Batch(backend, spec, MIXED)
    batch.fill()
    check(batch, batch.run(batch.new_ranges()))


def test_a_head_gives_the_same_bits_on_any_rank(attention_context, thread_counts):
    """Of 9 heads over 3 kv heads, the 5 first ones alone, with 1 thread and several."""
    for threads in thread_counts:
        torch.set_num_threads(threads)
        whole, spec = make(attention_context)
        batch = Batch(whole, spec, [(300, 1), (0, 17), (130, 50)])
        batch.fill()
        expected = batch.run(batch.new_ranges()).view(-1, 9, 64)[:, :5]
        part, part_spec = make(attention_context, 5, 2, group_sizes=(3, 2))
        share = Batch(part, part_spec, batch.lengths)
        kept = [*range(5), 9, 10, 12, 13]  # queries, keys, values
        share.qkv = [qkv.view(-1, 15, 64)[:, kept].reshape(-1, 9 * 64) for qkv in batch.qkv]
        share.fill()
        assert torch.equal(share.run(share.new_ranges()).view(-1, 5, 64), expected)


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_window_and_soft_cap(attention_context, window, soft_cap):
    batch = Batch(*make(attention_context, sliding_window=window, soft_cap=soft_cap), MIXED)
    batch.fill()
    check(batch, batch.run(batch.new_ranges()))


@pytest.mark.parametrize("heads", [50, 64, 20])
def test_many_heads_a_kv_head(attention_context, heads):
    batch = Batch(*make(attention_context, heads, 1, 32), [(100, 1), (0, 9)])
    batch.fill()
    check(batch, batch.run(batch.new_ranges()))


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_larger_blocks(attention_context, block_size):
    batch = Batch(*make(attention_context, sliding_window=70), MIXED, block_size=block_size)
    batch.fill()
    check(batch, batch.run(batch.new_ranges()))


def test_blocks_behind_the_window_are_never_read(attention_context):
    batch = Batch(*make(attention_context, sliding_window=40), [(300, 1), (200, 30)])
    batch.fill()
    for s, (context, _) in enumerate(batch.lengths):
        for dead in range((context - 39) // 16):
            batch.cache[batch.tables[s][dead]] = float("nan")
    check(batch, batch.run(batch.new_ranges()))


def test_a_row_depends_on_its_own_sequence_alone(attention_context, thread_counts):
    batch = Batch(*make(attention_context), [(0, 700), (0, 40), (0, 333)])
    whole = batch.run([(0, 0, 700), (1, 0, 40), (2, 0, 333)])
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for first, last in ((699, 700), (0, 1), (250, 270), (511, 700)):
            assert torch.equal(batch.run([(0, first, last)]), whole[first:last]), (threads, first, last)
        pair = batch.run([(2, 332, 333), (0, 600, 640)])
        assert torch.equal(pair, torch.cat([whole[740 + 332 : 740 + 333], whole[600:640]]))


def test_chunked_prefill_equals_one_prefill(attention_context):
    backend, spec = make(attention_context)
    batch = Batch(backend, spec, [(0, 400)])
    whole = batch.run([(0, 0, 400)])
    batch.cache.fill_(float("nan"))
    parts = [batch.run([(0, first, min(first + 130, 400))]) for first in range(0, 400, 130)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("rotary_dim", [64, 32, 20])
def test_rotation_and_cache_contents(attention_context, rotary_dim):
    backend, _ = make(attention_context, rotary_dim=rotary_dim)
    tokens, half = 50, rotary_dim // 2
    qkv = torch.randn(tokens, 15 * 64).bfloat16()
    positions = torch.randint(0, 200, (tokens,))
    angles = torch.arange(200)[:, None] / (100.0 ** (torch.arange(half) / half))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    cache = torch.zeros(backend.kv_cache_shape(8, 16), dtype=torch.bfloat16)
    slots = torch.randperm(128)[:tokens]
    slots[3] = -1
    got = qkv.clone()
    backend.rotate_and_write(got, positions, table, cache, slots)

    heads = qkv.float().view(tokens, 15, 64)
    expected = heads.clone()
    cos, sin = table[positions, None, :half], table[positions, None, half:]
    a, b = heads[:, :12, :half], heads[:, :12, half:rotary_dim]
    expected[:, :12, :half], expected[:, :12, half:rotary_dim] = a * cos - b * sin, b * cos + a * sin
    torch.testing.assert_close(got.view(tokens, 15, 64).float(), expected, rtol=2**-7, atol=1e-6)

    keys = cache[:, :, 0].view(8, 3, 32, 16, 2).permute(0, 3, 1, 2, 4).reshape(128, 3 * 64)
    values = cache[:, :, 1].view(8, 3, 8, 64, 2).permute(0, 2, 4, 1, 3).reshape(128, 3 * 64)
    want_k, want_v = torch.zeros_like(keys), torch.zeros_like(values)
    kept = slots >= 0
    want_k[slots[kept]] = got[kept, 9 * 64 : 12 * 64]
    want_v[slots[kept]] = got[kept, 12 * 64 :]
    assert torch.equal(keys, want_k)
    assert torch.equal(values, want_v)


def test_empty_batch_and_empty_sequences(attention_context):
    backend, spec = make(attention_context)
    batch = Batch(backend, spec, [(0, 5)])
    assert batch.run([]).shape == (0, 9 * 64)
    metadata = batch.metadata([(0, 0, 1)])
    metadata.sequence_lengths.zero_()  # a padding row of a recorded program
    metadata.slot_mapping.fill_(-1)
    out = backend.rotate_and_attend(
        batch.qkv[0][:1].clone(), torch.zeros(1, dtype=torch.int64), None, batch.cache, metadata
    )
    assert torch.equal(out, torch.zeros_like(out))


def test_refuses_what_it_cannot_do(attention_context):
    with pytest.raises(Unsupported, match="multiple of 16"):
        make(attention_context, dim=72)
    with pytest.raises(Unsupported, match="3 kv heads cannot serve 7 query heads"):
        make(attention_context, heads=7, kv_heads=3)
    with pytest.raises(Unsupported, match="up to 64 query heads, not 65"):
        make(attention_context, heads=66, kv_heads=2, group_sizes=(1, 65))
    backend, _ = make(attention_context)
    with pytest.raises(Unsupported, match="blocks of a multiple of 16"):
        backend.kv_cache_shape(4, 8)
