"""A program for TRITON_INTERPRET=1: rows to the ranks of their experts and back, one rank after the other.

Nobody can wait for anybody here, so signals are left out, and every operation is run until all data has arrived. Prints
one line for each mistake.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fourfold_comm_nccl import signal_kernels
from fourfold_comm_nccl.failures import Failures
from fourfold_comm_nccl.row_exchange import RowExchange
from fourfold_comm_nccl.rows_region import RowsRegion

ROUNDS = 2
MAX_TOKENS = 260
CPU = torch.device("cpu")


@triton.jit
def nobody_waits(send, wait, number, peer, table, world):
    tl.debug_barrier()


signal_kernels.signal_and_wait = nobody_waits


def view(memory: torch.Tensor, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return memory[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


def check(world: int, sizes: list[int], hidden: int, top_k: int, dtype: torch.dtype) -> None:
    """Experts give their rank's number times the row; everything that nobody may read is NaN."""
    region = RowsRegion(world_size=world, max_tokens=MAX_TOKENS, top_k=top_k, row_bytes=hidden * dtype.itemsize)
    memory = [torch.zeros(region.nbytes, dtype=torch.uint8) for _ in range(world)]
    owners = torch.arange(2 * world + 1, dtype=torch.int32) % world
    addresses = [one.data_ptr() for one in memory]
    ranks = [
        RowExchange(addresses, region, owners, Failures(world, CPU), rank=rank, timeout=1.0) for rank in range(world)
    ]
    rows = sum(sizes)
    arrived = [view(one, region.rows_at, dtype, rows, hidden) for one in memory]
    for one, came in zip(memory, arrived):
        came.fill_(torch.nan)
        view(one, region.returned_at, dtype, region.num_rows, hidden).fill_(torch.nan)
    x = [torch.randint(-8, 9, (count, hidden)).to(dtype) for count in sizes]
    ids = [torch.rand(count, len(owners)).argsort(1)[:, :top_k].int().contiguous() for count in sizes]
    for one in ids:
        one[::5, 0] = -1
        one[::7] = -1
    weights = [torch.rand(count, top_k) for count in sizes]
    for _ in range(ROUNDS):
        for rank, exchange in enumerate(ranks):
            exchange.count_from(4)
            exchange.dispatch(x[rank], ids[rank], weights[rank], sizes)
    name = f"{sizes} rows of {hidden} {dtype}, {top_k} experts"
    everything, all_ids = torch.cat(x), torch.cat(ids)
    of_rank = torch.cat([owners, torch.tensor([-1], dtype=torch.int32)])[all_ids]
    partials = []
    for rank, one in enumerate(memory):
        here = (of_rank == rank).any(1)
        if not torch.equal(
            view(one, region.ids_at, torch.int32, rows, top_k), all_ids.masked_fill(of_rank != rank, -1)
        ):
            print(f"{name}: wrong ids on rank {rank}")
        if not torch.equal(view(one, region.weights_at, torch.float32, rows, top_k), torch.cat(weights)):
            print(f"{name}: wrong weights on rank {rank}")
        if not torch.equal(arrived[rank][here], everything[here]) or not arrived[rank][~here].isnan().all():
            print(f"{name}: wrong rows on rank {rank}")
        partials.append((everything * (rank + 1)).masked_fill(~here[:, None], torch.nan))
    outs = [torch.full_like(one, torch.nan) for one in x]
    for _ in range(ROUNDS):
        for rank, exchange in enumerate(ranks):
            exchange.count_from(5)
            exchange.combine(partials[rank], outs[rank], sizes)
    expected = torch.stack([one.nan_to_num(0.0).float() for one in partials]).sum(0).to(dtype)
    if not torch.equal(torch.cat(outs), expected):
        print(f"{name}: wrong sums")


torch.manual_seed(0)
check(2, [3, 5], 48, 3, torch.float32)
check(2, [0, 9], 72, 1, torch.bfloat16)
check(2, [260, 7], 16, 2, torch.float32)
check(4, [2, 0, 6, 1], 2112, 5, torch.bfloat16)
print("done")
