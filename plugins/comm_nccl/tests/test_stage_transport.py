"""Stages over NCCL: a device a rank where there are enough; else ranks that share one, as if each had its own host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from fourfold.testing.ranks import RankPool
from fourfold.testing.stage_transport import StageTransportConformance


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Processes by number of ranks."""
    import torch

    def environment(rank: int, world_size: int) -> Mapping[str, str]:
        if torch.cuda.device_count() >= world_size:
            return {}
        # NCCL refuses two ranks of one host on a device; of different hosts, they talk over the loopback interface.
        return {"NCCL_HOSTID": f"host-of-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size, lambda rank: environment(rank, size)))
    for pool in pools.values():
        pool.close()


@pytest.mark.gpu
class TestNcclOnOneDevice(StageTransportConformance):
    name = "nccl"
    device = "cuda"
    devices = 1
    steps = 15


@pytest.mark.gpu
class TestNcclWithTensorParallelism(StageTransportConformance):
    name = "nccl"
    device = "cuda"
    devices = 1
    tensor_parallel_size = 2
    steps = 15


@pytest.mark.multi_gpu
class TestNccl(StageTransportConformance):
    name = "nccl"
    device = "cuda"
    devices = 2
