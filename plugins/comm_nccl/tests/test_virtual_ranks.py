"""The kernels of 2, 4 and 8 ranks at once on one device."""

from __future__ import annotations

import random
import time

import pytest
import torch

from fourfold_comm_nccl.fast_path import TEST_BYTES
from fourfold_comm_nccl.size_table import ALGORITHMS

from .virtual_ranks import DEVICE, VirtualRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDTH = 4096
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> VirtualRanks:
    made = VirtualRanks(request.param)
    made.load(WIDTH, *DTYPES)
    return made


def noise(ranks: VirtualRanks, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(ranks.world, *shape, device=DEVICE).to(dtype)


def total(parts: torch.Tensor) -> torch.Tensor:
    """In rank order and fp32, as the kernels sum: the bits are to be the same."""
    found = parts[0].float()
    for part in parts[1:]:
        found = found + part.float()
    return found.to(parts.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_have_the_bits_of_a_plain_sum(ranks: VirtualRanks, algorithm: str, dtype: torch.dtype) -> None:
    plan = ranks.plan(algorithm)
    for nbytes in (*TEST_BYTES, 4 << 20):
        parts = noise(ranks, nbytes // dtype.itemsize, dtype=dtype)
        outs = torch.full_like(parts, torch.nan)
        for rank, custom in ranks.each():
            custom.all_reduce(plan, parts[rank], outs[rank])
        expected = total(parts)
        assert all(torch.equal(out, expected) for out in outs)
        for rank, custom in ranks.each():
            custom.all_reduce(plan, parts[rank], parts[rank])
        assert all(torch.equal(part, expected) for part in parts)
    assert not any(custom.failed for custom in ranks.ranks)


def test_slots_are_not_reused_too_soon(ranks: VirtualRanks) -> None:
    draw, sizes = random.Random(ranks.world), (16, 8192, 65_536, 262_144, 1 << 20)
    for _ in range(4):
        plans = [(ranks.plan(draw.choice(ALGORITHMS)), draw.choice(sizes)) for _ in range(63)]
        data = [noise(ranks, nbytes // 2) for _, nbytes in plans]
        outs = [torch.full_like(one, torch.nan) for one in data]
        naps = [[draw.choice((0, 0, 0, 2_000, 30_000)) for _ in plans] for _ in ranks.ranks]
        torch.cuda.synchronize()

        for rank, custom in ranks.each():
            for (plan, _), part, out, nap in zip(plans, data, outs, naps[rank]):
                if nap:
                    torch.cuda._sleep(nap)
                custom.all_reduce(plan, part[rank], out[rank])
        bad = [place for place, (part, out) in enumerate(zip(data, outs)) if not (out == total(part)).all()]
        assert bad == []


def test_a_graph_of_an_odd_number_of_sums_can_be_replayed(ranks: VirtualRanks) -> None:
    plans = [ranks.plan(algorithm) for algorithm in (*ALGORITHMS, "one_shot")]
    data = [noise(ranks, 32_768) for _ in plans]
    outs = [torch.full_like(one, torch.nan) for one in data]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rank, custom in ranks.each():
            for plan, part, out in zip(plans, data, outs):
                custom.all_reduce(plan, part[rank], out[rank])
    for _ in range(7):
        for part, out in zip(data, outs):
            part.copy_(noise(ranks, 32_768))
            out.fill_(torch.nan)
        graph.replay()
        assert all((out == total(part)).all() for part, out in zip(data, outs))


@pytest.mark.parametrize("number", [-9, 2**31 - 9], ids=["past zero", "past the sign"])
def test_the_counter_may_overflow(ranks: VirtualRanks, number: int) -> None:
    for custom in ranks.ranks:
        custom.count_from(number)
    for step in range(18):
        plan = ranks.plan(ALGORITHMS[step % 2])
        parts = noise(ranks, 20_000)
        outs = torch.full_like(parts, torch.nan)
        for rank, custom in ranks.each():
            custom.all_reduce(plan, parts[rank], outs[rank])
        assert (outs == total(parts)).all()
    assert not any(custom.failed for custom in ranks.ranks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_that_of_the_sum(ranks: VirtualRanks, dtype: torch.dtype) -> None:
    for rows in (1, 3, 16 if dtype is torch.bfloat16 else 8):
        parts = noise(ranks, rows, WIDTH, dtype=dtype)
        before = torch.randn(rows, WIDTH, device=DEVICE).to(dtype)
        weight = torch.randn(WIDTH, device=DEVICE).to(dtype)
        residuals = before.expand(ranks.world, -1, -1).clone()
        expected = total(parts)
        for rank, custom in ranks.each():
            custom.all_reduce_add_rms_norm(
                ranks.plan("one_shot"), parts[rank], residuals[rank], weight, out=parts[rank], epsilon=1e-5
            )
        after = before + expected
        wide = after.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
        assert all(torch.equal(residual, after) for residual in residuals)
        assert all(torch.equal(part, parts[0]) for part in parts)
        error = (parts[0].float() - normed).norm() / normed.norm()
        assert error < (4e-3 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_missing_rank_is_named_within_the_limit(algorithm: str) -> None:
    ranks = VirtualRanks(4, timeout=0.3)
    ranks.load(WIDTH, torch.bfloat16)
    parts = noise(ranks, 32_768)
    started = time.monotonic()
    for rank, custom in ranks.each():
        for _ in range(50 if rank != 2 else 0):
            custom.all_reduce(ranks.plan(algorithm), parts[rank], parts[rank])
    torch.cuda.synchronize()
    assert time.monotonic() - started < 3
    assert [custom.missing for custom in ranks.ranks if custom.rank != 2] == [[2]] * 3
    assert not ranks.ranks[2].failed
