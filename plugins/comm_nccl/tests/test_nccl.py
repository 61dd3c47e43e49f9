"""The communicator on two devices, and on one device that two processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.distributed.self_test import self_test
from fourfold.distributed.store import scoped
from fourfold.entries import CommunicatorContext
from fourfold.errors import RpcTimeout, Unsupported
from fourfold.testing.communicator_cases import connected, data, digest
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_nccl import fast_path
from fourfold_comm_nccl.fast_path import try_sums
from fourfold_comm_nccl.nccl import build
from fourfold_comm_nccl.size_table import Plan, SizeTable
from fourfold_comm_nccl.table_cache import TableCache

SIZES = (16, 4096, 8208, 65_536, 262_144, 1 << 20, 3_000_016, 8 << 20, 16 << 20, 20 << 20)
OPERATIONS = 3
"""An odd number in one graph, so that slots change sides from replay to replay."""
EVERYTHING = SizeTable(sizes=(65_536, 1 << 20), plans=(Plan("one_shot", 32), Plan("two_shot", 32)))


def sums(rank: Rank) -> list[str]:
    """Digests of sums of many sizes, each in the open and in a graph that is replayed; the twin is a plain sum."""
    found = []
    with connected(rank, "nccl", "cuda") as communicator:
        assert communicator.fast_path is not None
        assert communicator.fast_path.table.plan(16_384) is not None
        for nbytes in SIZES:
            parts = [data(one, (nbytes // 2,), torch.bfloat16, f"cuda:{rank.rank}") for one in range(rank.world_size)]
            total = torch.stack([part.double() for part in parts]).sum(0).to(torch.bfloat16)
            summed = communicator.all_reduce(parts[rank.rank].clone())
            assert torch.equal(summed, total), nbytes
            outs = [torch.empty_like(summed) for _ in range(OPERATIONS)]
            graph = torch.cuda.CUDAGraph()
            with communicator.capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for out in outs:
                    communicator.all_reduce(out)
            for replay in range(3):
                for place, out in enumerate(outs):
                    out.copy_(parts[rank.rank] * (replay + place))
                graph.replay()
                expected = [total * (replay + place) for place in range(OPERATIONS)]
                for out, one in zip(outs, expected):
                    torch.testing.assert_close(out, one, rtol=2e-2, atol=0.13)
            found.append(digest(torch.stack(outs)))
            graph.reset()  # NCCL does not end while a graph holds its sums
    return found


def norms(rank: Rank) -> list[str]:
    """Digests of fused norms from one row to more than a fused kernel takes."""
    found = []
    with connected(rank, "nccl", "cuda") as communicator:
        device = f"cuda:{rank.rank}"
        weight = data(7, (4096,), torch.bfloat16, device)
        for rows in (1, 5, 64, 700):
            parts = [data(one, (rows, 4096), torch.bfloat16, device) for one in range(rank.world_size)]
            residual = data(9, (rows, 4096), torch.bfloat16, device)
            after = residual + torch.stack([part.double() for part in parts]).sum(0).to(torch.bfloat16)
            wide = after.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
            out, same = communicator.all_reduce_add_rms_norm(parts[rank.rank], residual, weight, 1e-5)
            assert same is residual
            assert torch.equal(residual, after)
            assert (out.float() - normed).norm() / normed.norm() < 4e-3
            found.append(digest(out))
        with pytest.raises(Unsupported, match="of one dtype"):
            communicator.all_reduce_add_rms_norm(parts[0], residual.float(), weight, 1e-5)
    return found


def misses(rank: Rank) -> Any:
    """On rank 0, which sums without the last rank: whom its barrier names, and what the next call says."""
    with connected(rank, "nccl", "cuda", timeout=2.0) as communicator:
        communicator.barrier()
        if rank.rank == rank.world_size - 1:
            rank.store.wait(["over"])
            return None
        named = []
        for _ in range(2):
            try:
                communicator.all_reduce(torch.ones(2048, device=f"cuda:{rank.rank}"))
                communicator.barrier()
            except RpcTimeout as error:
                named.append(list(error.missing_ranks))
        rank.store.set("over", "")
        return named


def sums_without_our_own(rank: Rank) -> bool:
    """One rank objects: no rank uses our own sums, and NCCL does it alone."""
    suitable = fast_path._unsuitable
    fast_path._unsuitable = lambda context: "not today" if rank.rank == 1 else ""
    try:
        with connected(rank, "nccl", "cuda") as communicator:
            summed = communicator.all_reduce(torch.ones(4096, device=f"cuda:{rank.rank}"))
            assert bool((summed == rank.world_size).all())
            with pytest.raises(Unsupported, match="without the custom all-reduce"):
                communicator.all_reduce_add_rms_norm(summed, summed, summed, 1e-5)
            return communicator.fast_path is None
    finally:
        fast_path._unsuitable = suitable


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
class TestTwoDevices:
    @pytest.fixture
    def run(self, rank_pool: Callable[[int], RankPool]) -> Callable[..., list[Any]]:
        return rank_pool(2).run

    def test_sums_are_right_and_the_same_in_and_out_of_graphs(self, run: Callable[..., list[Any]]) -> None:
        first, second = run(sums)
        assert first == second

    def test_norms_are_right_and_the_same(self, run: Callable[..., list[Any]]) -> None:
        first, second = run(norms)
        assert first == second

    def test_a_rank_that_a_kernel_misses_is_named_from_then_on(self, run: Callable[..., list[Any]]) -> None:
        assert run(misses)[0] == [[1], [1]]

    def test_an_objection_leaves_all_ranks_to_nccl(self, run: Callable[..., list[Any]]) -> None:
        assert run(sums_without_our_own) == [True, True]


@contextmanager
def on_one_device(rank: Rank, cache: str) -> Iterator[Any]:
    """NCCL takes ranks of one device for ranks of two hosts; the table is not measured, where a meeting takes 2 ms."""
    os.environ |= {"NCCL_HOSTID": f"host {rank.rank}", "NCCL_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": cache}
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    TableCache(torch.cuda.get_device_name(device), 2, torch.__version__, torch.cuda.nccl.version()).write(EVERYTHING)
    context = CommunicatorContext(
        group="tp", ranks=(0, 1), rank=rank.rank, device=device, store=scoped(rank.store, "one device"), timeout=30.0
    )
    communicator = build(context)
    try:
        yield communicator
    finally:
        communicator.close()


def shares_a_device(rank: Rank, cache: str) -> list[str]:
    """What was wrong."""
    with on_one_device(rank, cache) as communicator:
        assert communicator.fast_path is not None
        device = torch.device("cuda", 0)
        problems = [try_sums(communicator.fast_path.custom, device), self_test(communicator, device) or ""]
        memory = communicator.peer_memory(64)
        memory.buffer(1 - rank.rank).fill_(5 + rank.rank)
        memory.barrier()
        seen = int(memory.buffer(rank.rank)[63])
        memory.barrier()
        memory.close()
        return [*problems, f"{seen} in peer memory" if seen != 6 - rank.rank else ""]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_on_one_device_map_each_other(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(shares_a_device, str(tmp_path)) == [["", "", ""]] * 2
