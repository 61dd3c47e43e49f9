"""How long `fourfold --help` and the way to a ready server take, beside bare imports that they cannot do without.

``python benchmarks/startup.py [--repetitions 3]``. "First use" has an empty cache: the model is converted and the
kernels are compiled. Two ranks are compared with one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serving import OURS, server
from workload import spread

COMMAND = Path(sys.executable).parent / "fourfold"
TWO_RANKS = " --executor mp --tensor-parallel-size 2"


def seconds(command: list[str | Path]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def ready(cache: str, options: str = "") -> float:
    os.environ["XDG_CACHE_HOME"] = cache
    with server(OURS + options, 18433, "/readyz", 120) as (_, elapsed):
        return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    python = [seconds([sys.executable, "-c", "pass"]) for _ in range(repetitions)]
    torch = [seconds([sys.executable, "-c", "import torch"]) for _ in range(repetitions)]
    helped = [seconds([COMMAND, "--help"]) for _ in range(repetitions)]
    first, again, two_ranks = [], [], []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as cache:
            first.append(ready(cache))
            again.append(ready(cache))
            ready(cache, TWO_RANKS)  # compiles what only several ranks need
            two_ranks.append(ready(cache, TWO_RANKS))
    floor_help, floor_ready = statistics.median(python), statistics.median(torch)
    for name, values, floor in (
        ("fourfold --help", helped, floor_help),
        ("ready, first use", first, floor_ready),
        ("ready, cached", again, floor_ready),
        ("ready, mp, tp=2", two_ranks, statistics.median(again)),
    ):
        milliseconds = [value * 1e3 for value in values]
        print(f"{name:18} {spread(milliseconds)} ms, {statistics.median(values) / floor:.1f}x of its floor")
    print(f"floors: python {floor_help * 1e3:.0f} ms, import torch {floor_ready * 1e3:.0f} ms; of mp: one rank, cached")


if __name__ == "__main__":
    main()
