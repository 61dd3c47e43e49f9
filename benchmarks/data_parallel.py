"""Two replicas of one thread each beside one engine of one and of two threads, over HTTP; a killed replica; memory.

``python benchmarks/data_parallel.py [--layouts 1x1,1x2,2x1] [--concurrency 64,16]``; a layout is replicas x threads.
Weights are of the embedded model, in bfloat16. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from serving import Sample, load, request, server
from workload import prompts, spread

PORT = 18441
COMMAND = (
    f"{Path(sys.executable).parent / 'fourfold'} serve smollm2 --dtype bfloat16 --max-model-len 2048 --port {{port}}"
)
CACHE = " --kv-cache-memory 400000000"


def topology() -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/topology", timeout=5) as reply:
        found: dict[str, list[dict[str, str]]] = json.load(reply)
    return found


def wait_for_replicas(deadline: float = 120.0) -> None:
    """Until every replica is ready."""
    start = time.perf_counter()
    while any(replica["state"] != "running" for replica in topology()["replicas"]):
        if time.perf_counter() - start > deadline:
            raise SystemExit(f"not all replicas were ready within {deadline:g} s: {topology()['replicas']}")
        time.sleep(0.02)


def pss_gb(process: psutil.Process) -> float:
    """Of all processes of a server: memory that several share counts once."""
    tree = [process, *process.children(recursive=True)]
    return sum(child.memory_full_info().pss for child in tree) / 1e9


def throughput(concurrencies: Sequence[int], repetitions: int) -> None:
    for concurrency in concurrencies:
        rates = []
        for seed in range(repetitions):
            ids = prompts(2 * concurrency if concurrency >= 32 else 4 * concurrency, 128, seed)
            start = time.perf_counter()
            asyncio.run(load(PORT, "smollm2", ids, 128, concurrency))
            rates.append(len(ids) * 128 / (time.perf_counter() - start))
        print(f"  concurrency {concurrency:3}: {spread(rates)} tok/s", flush=True)


async def kill_under_load(num_streams: int) -> tuple[list[Sample], float, float]:
    """Streams, the moment of the kill, and when the replica was ready again."""
    streams = [asyncio.create_task(request(PORT, "smollm2", ids, 400)) for ids in prompts(num_streams, 128, 77)]
    await asyncio.sleep(3)
    victim = next(one for one in topology()["processes"] if (one["role"], one["label"]) == ("engine_core", "DP0"))
    os.kill(int(victim["pid"]), signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(wait_for_replicas)
    ready = time.perf_counter()
    return list(await asyncio.gather(*streams)), killed, ready


def measure_kill() -> None:
    samples, killed, ready = asyncio.run(kill_under_load(16))
    pauses = [max(b - a for a, b in zip(sample.events, sample.events[1:])) for sample in samples]
    complete = sum(len(sample.events) == 400 for sample in samples)
    print(f"  kill -9 under 16 streams: {complete} of 16 complete, longest pause {max(pauses):.2f} s", flush=True)
    print(f"  replica ready again after {ready - killed:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default="1x1,1x2,2x1")
    parser.add_argument("--concurrency", default="64,16")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    concurrencies = [int(one) for one in options.concurrency.split(",")]
    for layout in options.layouts.split(","):
        replicas, threads = map(int, layout.split("x"))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        command = f"{COMMAND}{CACHE} --data-parallel-size {replicas}"
        with server(command, PORT, "/readyz", 300) as (process, seconds):
            wait_for_replicas()
            print(
                f"{replicas} replica(s) of {threads} thread(s): ready in {seconds:.2f} s, PSS {pss_gb(process):.2f} GB"
            )
            asyncio.run(load(PORT, "smollm2", prompts(8, 128, 999), 8, 8))
            throughput(concurrencies, options.repetitions)
            print(f"  PSS after it {pss_gb(process):.2f} GB", flush=True)
            if replicas > 1:
                measure_kill()


if __name__ == "__main__":
    main()
