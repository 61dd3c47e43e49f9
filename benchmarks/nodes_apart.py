"""Why stages, and not the ranks of a stage, go to different nodes: two nodes of one rank each, at a distance.

Tokens a second over HTTP of a pipeline and of tensor parallelism between two hosts, which are network namespaces joined
by a slow cable; prints their ratio and the measured round trip: ``python benchmarks/nodes_apart.py [--delay-ms 1]``.
As root. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from serving import load
from workload import prompts, spread

from fourfold.nodes.secret import new_secret
from fourfold.testing.hosts import ADDRESSES, INTERFACE, Hosts

PORT = 18441
LAYOUTS = {"pipeline": "--pipeline-parallel-size", "tensor": "--tensor-parallel-size"}
INPUT, OUTPUT = 64, 64
"""Tokens of a request."""
READY_SECONDS = 180


def measure(layout: str, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The round trip in milliseconds, and tokens a second of each repetition."""
    with Hosts(delay=options.delay_ms / 1e3) as hosts, tempfile.TemporaryDirectory() as folder:
        trip = hosts.round_trip() * 1e3
        common = {"FOURFOLD_CLUSTER_SECRET": new_secret(), "OMP_NUM_THREADS": "1"}
        shared = ["serve", "smollm2", "--dtype=bfloat16", "--max-model-len=2048", f"--port={PORT}", "--nnodes=2"]
        shared += [f"{LAYOUTS[layout]}=2", f"--master-address={ADDRESSES[0]}"]
        follower = ["--headless", "--node-rank=1", f"--node-interface={INTERFACE}"]
        for host, own in enumerate(([], follower)):
            runs = Path(folder) / str(host)
            runs.mkdir()
            command = [Path(sys.executable).parent / "fourfold", *shared, *own]
            hosts.start(host, *command, log=runs / "log", XDG_RUNTIME_DIR=str(runs), **common)
        client = [sys.executable, __file__, "--load", str(options.concurrency), str(options.repetitions)]
        process = hosts.start(0, *client, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        out = process.communicate(timeout=READY_SECONDS + 120 * options.repetitions)[0]
        if process.returncode:
            logs = "".join((Path(folder) / str(host) / "log").read_text()[-2000:] for host in (0, 1))
            raise SystemExit(f"{layout}: no figures\n{logs}")
        return trip, json.loads(out)


def measure_load(concurrency: int, repetitions: int) -> list[float]:
    """On the first host: wait for the server, warm it up, and send as many requests at a time."""
    until = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=1):
                break
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until:
                raise SystemExit(f"the server was not ready within {READY_SECONDS} s") from None
            time.sleep(0.1)
    asyncio.run(load(PORT, "smollm2", prompts(concurrency, INPUT, 999), 8, concurrency))
    found = []
    for seed in range(repetitions):
        start = time.perf_counter()
        asyncio.run(load(PORT, "smollm2", prompts(concurrency, INPUT, seed), OUTPUT, concurrency))
        found.append(concurrency * OUTPUT / (time.perf_counter() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="that a frame takes from node to node")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--load", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(measure_load(*options.load)))
        return
    medians = {}
    for layout in LAYOUTS:
        trip, found = measure(layout, options)
        medians[layout] = statistics.median(found)
        print(f"{layout:9} between nodes: {spread(found):22} tokens/s, round trip {trip:.2f} ms", flush=True)
    ratio = medians["pipeline"] / medians["tensor"]
    print(f"pipeline / tensor at concurrency {options.concurrency}: {ratio:.2f}x")


if __name__ == "__main__":
    main()
