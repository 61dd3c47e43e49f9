"""Several ranks in one process: a stream each on one device, over the same kernels as real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fourfold_comm_nccl.custom_all_reduce import CustomAllReduce
from fourfold_comm_nccl.region import Region
from fourfold_comm_nccl.size_table import ALGORITHMS, Plan

DEVICE = torch.device("cuda", 0)
PROGRAMS = 96
"""Of all ranks together: all of them spin at once, two on a processor at most."""


class VirtualRanks:
    def __init__(self, world: int, *, timeout: float = 20.0) -> None:
        self.world = world
        self.programs = max(8, PROGRAMS // world)
        region = Region(world_size=world, max_bytes=4 << 20)
        self._memory = [torch.zeros(region.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(world)]
        addresses = [one.data_ptr() for one in self._memory]
        self.ranks = [
            CustomAllReduce(addresses, region, rank=rank, device=DEVICE, timeout=timeout) for rank in range(world)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        torch.cuda.synchronize()

    def plan(self, algorithm: str) -> Plan:
        return Plan(algorithm, self.programs)

    def load(self, width: int, *dtypes: torch.dtype) -> None:
        """Compile and load every kernel, since that may wait for what runs: rank 0 alone, which gives up at once."""
        region = self.ranks[0].region
        memory = torch.zeros(region.nbytes, dtype=torch.uint8, device=DEVICE)
        alone = CustomAllReduce([memory.data_ptr()] * self.world, region, rank=0, device=DEVICE, timeout=0.001)
        for dtype in dtypes:
            tensor = torch.zeros(4, width, dtype=dtype, device=DEVICE)
            for algorithm in ALGORITHMS:
                alone.all_reduce(self.plan(algorithm), tensor, tensor)
            rest = (tensor.clone(), tensor[0].clone())
            alone.all_reduce_add_rms_norm(self.plan("one_shot"), tensor, *rest, out=tensor, epsilon=1e-5)
        alone.meet()
        torch.cuda.synchronize()

    def each(self) -> Iterator[tuple[int, CustomAllReduce]]:
        """Every rank on its stream: all at once, after what is queued and before what will be."""
        here = torch.cuda.current_stream()
        for rank, (custom, stream) in enumerate(zip(self.ranks, self.streams)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                yield rank, custom
        for stream in self.streams:
            here.wait_stream(stream)
