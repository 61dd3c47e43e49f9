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
from itertools import pairwise
from pathlib import Path

import psutil
from serving import load, server
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


async def stream(ids: list[int], tokens: int) -> tuple[float, int]:
    """The longest pause in seconds, and the tokens that the answer says it has; 0 for one that broke."""
    body = {"model": "smollm2", "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    times, count = [], 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", count)
    writer.close()
    return max(b - a for a, b in pairwise(times)), count


async def kill_under_load(num_streams: int, tokens: int) -> tuple[list[tuple[float, int]], float]:
    """What became of the streams, and the seconds from the kill until the replica was ready again."""
    streams = [asyncio.create_task(stream(ids, tokens)) for ids in prompts(num_streams, 128, 77)]
    await asyncio.sleep(3)
    victim = next(one for one in topology()["processes"] if (one["role"], one["label"]) == ("engine_core", "DP0"))
    os.kill(int(victim["pid"]), signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(wait_for_replicas)
    ready = time.perf_counter() - killed
    return list(await asyncio.gather(*streams)), ready


def measure_kill() -> None:
    streams, ready = asyncio.run(kill_under_load(16, 400))
    complete = sum(count == 400 for _, count in streams)
    longest = max(pause for pause, _ in streams)
    print(f"  kill -9 under 16 streams: {complete} of 16 complete, longest pause {longest:.2f} s", flush=True)
    print(f"  replica ready again after {ready:.2f} s", flush=True)


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
