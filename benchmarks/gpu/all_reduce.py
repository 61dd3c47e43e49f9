"""All-reduce between CUDA devices, in device graphs: our own sums against NCCL's, a fused norm against two launches.

Prints the median microseconds of each size, what the size table chose, and ratios. Aims on two devices: 2.0x at 16 KB,
1.8x at 256 KB, 1.3x at 8 MB, and at no size more than 5% slower than NCCL.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_nccl.autotune import candidates, microseconds

KILOBYTES = (1, 4, 8, 16, 24, 48, 64, 96, 128, 200, 256, 400, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
AIMS = {16: 2.0, 256: 1.8, 8192: 1.3}
WIDTH = 4096
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
OPERATIONS, REPLAYS, TURNS = 20, 9, 2


def measure_sums(rank: Rank, everything: bool) -> list[list[Any]]:
    """[size]: kilobytes, NCCL's and our microseconds, the plan; with ``everything`` also those of all plans."""
    rows = []
    with connected(rank, "nccl", "cuda") as communicator:
        if communicator.fast_path is None:
            return []
        custom = communicator.fast_path.custom
        library = partial(ProcessGroupCommunicator.all_reduce, communicator)
        for kilobytes in KILOBYTES:
            tensor = torch.randn(kilobytes << 9, device=f"cuda:{rank.rank}").to(torch.bfloat16)
            plan = communicator.fast_path.plan(tensor)
            runs = {"nccl": partial(library, tensor), "ours": partial(communicator.all_reduce, tensor)}
            if everything:
                for one in candidates(kilobytes << 10, custom):
                    runs[f"{one.algorithm} {one.programs}"] = partial(custom.all_reduce, one, tensor, tensor)
            times = alternate(runs, custom.meet)
            name = "nccl" if plan is None else f"{plan.algorithm} on {plan.programs}"
            rows.append([kilobytes, times["nccl"], times["ours"], name, times if everything else {}])
    return rows


def measure_norms(rank: Rank) -> list[list[float]]:
    """[rows]: rows, fused, all_reduce and a norm kernel, NCCL and a norm kernel; microseconds."""
    found = []
    with connected(rank, "nccl", "cuda") as communicator:
        if communicator.fast_path is None:
            return []
        custom = communicator.fast_path.custom
        weight = torch.randn(WIDTH, device=f"cuda:{rank.rank}").to(torch.bfloat16)
        for rows in ROWS:
            tensor = torch.randn(rows, WIDTH, device=f"cuda:{rank.rank}").to(torch.bfloat16)
            residual, out = torch.randn_like(tensor), torch.empty_like(tensor)

            def two_launches(reduce: Any, tensor: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
                reduce(tensor)
                custom.all_reduce_add_rms_norm(None, tensor, residual, weight, out=out, epsilon=1e-5)

            library = partial(ProcessGroupCommunicator.all_reduce, communicator)
            runs = {
                "fused": partial(communicator.all_reduce_add_rms_norm, tensor, residual, weight, 1e-5),
                "ours": partial(two_launches, communicator.all_reduce, tensor, residual, out),
                "nccl": partial(two_launches, library, tensor, residual, out),
            }
            times = alternate(runs, custom.meet)
            found.append([rows, times["fused"], times["ours"], times["nccl"]])
    return found


def alternate(runs: dict[str, Any], meet: Any) -> dict[str, float]:
    """The better of several turns of each, in turn."""
    times: dict[str, float] = {}
    for _ in range(TURNS):
        for name, run in runs.items():
            taken = microseconds(run, meet, operations=OPERATIONS, replays=REPLAYS)
            times[name] = min(taken, times.get(name, taken))
    return times


def main() -> None:
    """Print both tables and whether the aims are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--everything", action="store_true", help="time every kernel and number of programs too")
    given = parser.parse_args()
    with RankPool(given.ranks) as pool:
        rows = pool.run(measure_sums, given.everything, deadline=300.0)[0]
        norms = pool.run(measure_norms, deadline=120.0)[0]
    if not rows:
        print("no custom all-reduce here; the log says why")
        return
    print(f"all-reduce over {given.ranks} devices, bfloat16, microseconds in a graph")
    for kilobytes, nccl, ours, plan, times in rows:
        aim = f"   aim {AIMS[kilobytes]:.1f}x" if kilobytes in AIMS else ""
        more = "".join(f"  {name} {value:.1f}" for name, value in list(times.items())[2:])
        print(f"{kilobytes:6} KB   nccl {nccl:7.2f}   ours {ours:7.2f}   {nccl / ours:5.2f}x   {plan}{aim}{more}")
    slowest = min(rows, key=lambda row: row[1] / row[2])
    print(f"least: {slowest[1] / slowest[2]:.2f}x at {slowest[0]} KB (at least 0.95x)")
    print(f"all-reduce, residual and norm of rows of {WIDTH}")
    for count, fused, ours, nccl in norms:
        columns = f"fused {fused:7.2f}   all-reduce + norm {ours:7.2f}   nccl + norm {nccl:7.2f}"
        print(f"{count:6} rows   {columns}   {ours / fused:5.2f}x   {nccl / fused:5.2f}x")


if __name__ == "__main__":
    main()
