"""A program for TRITON_INTERPRET=1: the kernels of all ranks, one rank after the other, against plain sums.

Nobody can wait for anybody here, so signals are left out and every operation is run until all data has arrived: once
for each time that data moves, and once to read it. Prints one line for each mistake.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fourfold_comm_nccl import signal_kernels
from fourfold_comm_nccl.custom_all_reduce import CustomAllReduce
from fourfold_comm_nccl.region import Region
from fourfold_comm_nccl.size_table import Plan

ROUNDS = 3


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole ones, whose sums are exact: the interpreter does not round to nearest."""
    return torch.randint(-8, 9, shape).to(dtype)


@triton.jit
def nobody_waits(send, wait, number, peer, table, world):
    tl.debug_barrier()


signal_kernels.signal_and_wait = nobody_waits


class Ranks:
    def __init__(self, world: int) -> None:
        region = Region(world_size=world, max_bytes=96 << 10)
        self.memory = [torch.zeros(region.nbytes, dtype=torch.uint8) for _ in range(world)]
        addresses = [one.data_ptr() for one in self.memory]
        cpu = torch.device("cpu")
        self.ranks = [CustomAllReduce(addresses, region, rank=rank, device=cpu, timeout=1.0) for rank in range(world)]
        self.number = 6

    def turns(self):
        for _ in range(ROUNDS):
            for rank, custom in enumerate(self.ranks):
                custom.count_from(self.number)
                yield rank, custom
        self.number += 1


def check_sums(world: int, dtype: torch.dtype) -> None:
    ranks = Ranks(world)
    for algorithm, nbytes in (
        ("one_shot", 48),
        ("one_shot", 40_016),
        ("two_shot", 48),
        ("two_shot", 70_000),
        ("two_shot", 98_304),
    ):
        parts = [numbers(nbytes // dtype.itemsize, dtype=dtype) for _ in range(world)]
        outs = [torch.full_like(parts[0], torch.nan) for _ in range(world)]
        for rank, custom in ranks.turns():
            custom.all_reduce(Plan(algorithm, 3), parts[rank], outs[rank])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for rank, out in enumerate(outs):
            if not torch.equal(out, total.to(dtype)):
                print(f"{algorithm} of {nbytes} bytes of {dtype} over {world}: wrong on rank {rank}")


def check_norms(world: int, dtype: torch.dtype) -> None:
    ranks = Ranks(world)
    for algorithm, rows, width in (("one_shot", 1, 64), ("one_shot", 5, 72), ("one_shot", 7, 576), (None, 4, 576)):
        parts = [numbers(rows, width, dtype=dtype) for _ in range(world)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        before = numbers(rows, width, dtype=dtype)
        weight = numbers(width, dtype=dtype)
        after = (before.float() + total.to(dtype).float()).to(dtype)
        wide = after.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(dtype)
        if algorithm is None:
            parts = [total.to(dtype)] * world
        residuals = [before.clone() for _ in range(world)]
        outs = [torch.full_like(before, torch.nan) for _ in range(world)]

        for rank, custom in ranks.turns():
            residuals[rank].copy_(before)
            plan = None if algorithm is None else Plan(algorithm, 3)
            custom.all_reduce_add_rms_norm(plan, parts[rank], residuals[rank], weight, out=outs[rank], epsilon=1e-5)
        for rank, (residual, out) in enumerate(zip(residuals, outs)):
            if not torch.equal(residual, after):
                print(f"{algorithm} norm of {rows} x {width} over {world}: wrong residual on rank {rank}")
            if not torch.allclose(
                out.float(), normed.float(), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5
            ):
                print(f"{algorithm} norm of {rows} x {width} over {world}: wrong norm on rank {rank}")


torch.manual_seed(0)
for world, dtype in ((2, torch.bfloat16), (2, torch.float32), (4, torch.bfloat16)):
    check_sums(world, dtype)
    check_norms(world, dtype)
print("done")
