"""All-reduce among processes of this host: every communicator that runs here, in turns, and what the fastest gains.

Prints the median microseconds of each size and the ratio to the slowest, which is gloo where it is installed. Aims on
two idle cores: 8x at 16 KB, 3x at 1 MB with 2 ranks; with 4 ranks no size may collapse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool

KILOBYTES = (1, 16, 64, 256, 1024, 4096)
ROUNDS = 200
"""Of each communicator at each size; a quarter of them for the large ones."""


def measure(rank: Rank, names: list[str], dtype_name: str) -> list[list[float]]:
    """[size][communicator] microseconds at the median."""
    dtype = getattr(torch, dtype_name)
    rows = []
    with ExitStack() as stack:
        communicators = [stack.enter_context(connected(rank, name, "cpu")) for name in names]
        for kilobytes in KILOBYTES:
            tensor = torch.zeros(kilobytes * 1024 // dtype.itemsize, dtype=dtype)
            row = []
            for communicator in communicators:
                for _ in range(10):
                    communicator.all_reduce(tensor)
                times = []
                for _ in range(ROUNDS if kilobytes <= 256 else ROUNDS // 4):
                    started = time.perf_counter()
                    communicator.all_reduce(tensor)
                    times.append(time.perf_counter() - started)
                row.append(statistics.median(times) * 1e6)
            rows.append(row)
    return rows


def main() -> None:
    """Print one table a world size and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    given = parser.parse_args()
    entries = load_plugins().communicators()
    scored = {name: entry.suits(EngineConfig()).score for name, entry in entries.items() if "cpu" in entry.capabilities}
    names = sorted((name for name in scored if scored[name] > 0), key=lambda name: -scored[name])
    for world_size in given.ranks:
        with RankPool(world_size) as pool:
            for dtype in given.dtype:
                print(f"{world_size} ranks, {dtype}, microseconds")
                rows = pool.run(measure, names, dtype, deadline=120.0)[0]
                for kilobytes, row in zip(KILOBYTES, rows):
                    columns = "".join(f"   {name} {value:9.1f}" for name, value in zip(names, row))
                    print(f"{kilobytes:6} KB{columns}   {names[-1]} / {names[0]} {row[-1] / row[0]:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
