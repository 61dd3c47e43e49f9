"""The packed linear method against torch in fp32: sizes, strides, slices, and independence of batch and threads."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fourfold.errors import EngineError, Unsupported
from fourfold.shared_memory import VARIABLE, SharedMemory
from fourfold_kernels_cpu.packed_linear import PackedLinearMethod


def pack(method, dense, bias=None):
    weight = method.create(dense.shape[1], dense.shape[0], bias=bias is not None, dtype=torch.bfloat16)
    method.load_shard(weight, dense, first_row=0)
    if bias is not None:
        method.load_bias(weight, bias, first_row=0)
    return weight


@pytest.mark.parametrize(
    ("out_features", "in_features"), [(960, 576), (100, 77), (33, 32), (5, 3), (64, 1536), (31, 1)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_matches_fp32_product(compute_context, out_features, in_features, bias):
    method = PackedLinearMethod(compute_context)
    dense = torch.randn(out_features, in_features).bfloat16()
    vector = torch.randn(out_features).bfloat16() if bias else None
    weight = pack(method, dense, vector)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 29, 64, 333):
        x = torch.randn(rows, in_features).bfloat16()
        full = method.apply(weight, x, out_dtype=torch.float32)
        expected = x.float() @ dense.float().T + (vector.float() if bias else 0)
        torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-4 * in_features**0.5)
        assert torch.equal(method.apply(weight, x), full.bfloat16())


def test_empty_batch(compute_context):
    method = PackedLinearMethod(compute_context)
    weight = pack(method, torch.randn(64, 48).bfloat16())
    assert method.apply(weight, torch.empty(0, 48, dtype=torch.bfloat16)).shape == (0, 64)
    assert method.embed(weight, torch.empty(0, dtype=torch.int64)).shape == (0, 48)


def test_rows_may_be_strided(compute_context):
    method = PackedLinearMethod(compute_context)
    weight = pack(method, torch.randn(96, 64).bfloat16())
    wide = torch.randn(9, 200).bfloat16()
    x = wide[:, 32:96]
    assert torch.equal(method.apply(weight, x), method.apply(weight, x.contiguous()))


def test_a_row_does_not_depend_on_batch_or_threads(compute_context, thread_counts):
    method = PackedLinearMethod(compute_context)
    weight = pack(method, torch.randn(1000, 577).bfloat16())
    x = torch.randn(700, 577).bfloat16()
    whole = method.apply(weight, x, out_dtype=torch.float32)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for first, count in ((0, 1), (17, 5), (100, 16), (300, 400)):
            part = method.apply(weight, x[first : first + count], out_dtype=torch.float32)
            assert torch.equal(part, whole[first : first + count]), (threads, first, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(576, 192, 192), (7, 30, 1, 58), (16, 16), (33,)])
def test_packs_slices_of_any_dtype(compute_context, dtype, cuts):
    method = PackedLinearMethod(compute_context)
    dense = torch.randn(sum(cuts), 75).to(torch.bfloat16).to(dtype)
    weight = method.create(75, sum(cuts), bias=False, dtype=torch.bfloat16)
    first = 0
    for block in reversed(dense.split(cuts)):
        first = sum(cuts) - block.shape[0] if not first else first - block.shape[0]
        method.load_shard(weight, block, first_row=first)
    assert torch.equal(weight.dense(), dense.bfloat16())


def test_packs_transposed_and_strided_sources(compute_context):
    method = PackedLinearMethod(compute_context)
    source = torch.randn(80, 90).bfloat16()
    assert torch.equal(pack(method, source.T).dense(), source.T)
    assert torch.equal(pack(method, source[::2, 10:60]).dense(), source[::2, 10:60])


def test_embedding_rows_and_range(compute_context):
    method = PackedLinearMethod(compute_context)
    for width in (576, 75, 1):
        dense = torch.randn(100, width).bfloat16()
        weight = pack(method, dense)
        ids = torch.tensor([0, 99, 31, 32, 5, 5])
        assert torch.equal(method.embed(weight, ids), dense[ids])
        shifted = method.embed_range(weight, torch.tensor([49, 50, 149, 150, -1]), first_id=50, factor=1.5)
        expected = torch.zeros(5, width)
        expected[1], expected[2] = dense[0].float() * 1.5, dense[99].float() * 1.5
        assert torch.equal(shifted, expected.bfloat16())


def test_refuses_what_it_cannot_do(compute_context):
    method = PackedLinearMethod(compute_context)
    weight = pack(method, torch.randn(64, 48).bfloat16())
    with pytest.raises(Unsupported, match="float32"):
        method.create(4, 4, bias=False, dtype=torch.float32)
    with pytest.raises(Unsupported, match="do not fit"):
        method.load_shard(weight, torch.zeros(2, 48), first_row=63)
    with pytest.raises(Unsupported, match="without a bias"):
        method.load_bias(weight, torch.zeros(64), first_row=0)
    with pytest.raises(Unsupported, match="bfloat16 rows"):
        method.apply(weight, torch.zeros(2, 48))
    with pytest.raises(Unsupported, match="rows of 40"):
        method.apply(weight, torch.zeros(2, 40, dtype=torch.bfloat16))


def test_replicas_share_one_copy_and_refuse_another(compute_context, monkeypatch):
    with closing(SharedMemory()) as memory:
        monkeypatch.setenv(VARIABLE, memory.environment[VARIABLE])
        dense, more = torch.randn(100, 77).bfloat16(), torch.randn(40, 77).bfloat16()
        weights = []
        for _ in range(2):
            method = PackedLinearMethod(compute_context)
            weight = method.create(77, 140, bias=False, dtype=torch.bfloat16)
            method.load_shard(weight, more, first_row=100)
            method.load_shard(weight, dense, first_row=0)
            assert torch.equal(weight.dense(), torch.cat([dense, more]))
            weights.append(weight)
        assert weights[0].packed_address != weights[1].packed_address
        weights[0].packed.view(torch.int16)[0] = 77
        assert weights[1].packed.view(torch.int16)[0] == 77
        changed = dense.clone()
        changed[50, 3] += 1
        third = PackedLinearMethod(compute_context)
        weight = third.create(77, 140, bias=False, dtype=torch.bfloat16)
        with pytest.raises(EngineError, match="differ from those of a replica"):
            third.load_shard(weight, changed, first_row=0)
        elsewhere = PackedLinearMethod(replace(compute_context, rank=1))
        weight = elsewhere.create(77, 140, bias=False, dtype=torch.bfloat16)
        elsewhere.load_shard(weight, changed, first_row=0)
        assert torch.equal(weight.dense()[:100], changed)


def test_replicas_change_their_common_copy_together(compute_context, monkeypatch):
    with closing(SharedMemory()) as memory:
        monkeypatch.setenv(VARIABLE, memory.environment[VARIABLE])
        descriptor = int(memory.environment[VARIABLE].rsplit("/", 1)[1])
        first, second = torch.randn(2, 3000, 1000).bfloat16()
        methods = [PackedLinearMethod(compute_context) for _ in range(2)]
        weights = [method.create(1000, 3000, bias=False, dtype=torch.bfloat16) for method in methods]

        def load(dense):
            for method, weight in zip(methods, weights, strict=True):
                method.load_shard(weight, dense, first_row=0)
                assert torch.equal(weight.dense(), dense)

        load(first)
        for method in methods:
            method.discard_weights()
        load(second)
        for method in methods:
            method.release_weights(keep=True)
            method.restore_weights()
        assert torch.equal(weights[0].dense(), second)
        held = os.fstat(descriptor).st_blocks
        for method in methods:
            method.release_weights(keep=False)
        assert os.fstat(descriptor).st_blocks < held / 4
        for method in methods:
            method.restore_weights()
        load(first)
