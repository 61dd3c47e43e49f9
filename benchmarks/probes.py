"""How fast probes answer while everything is busy: milliseconds of /livez, /readyz, /health and /metrics.

``python benchmarks/probes.py [--replicas 2] [--streams 64] [--seconds 30]``. The load is streams with long prompts of
text, and one after another of what has to be refused: no JSON, too many tokens, megabytes of brackets. Probes come from
a process of their own, each over a new connection. Weights are of the embedded model. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from serving import server

PORT = 18451
PATHS = ("/livez", "/readyz", "/health", "/metrics")
COMMAND = (
    f"{Path(sys.executable).parent / 'fourfold'} serve smollm2 --dtype bfloat16 --port {{port}} --data-parallel-size "
)
CACHE = " --kv-cache-memory 400000000"
EVERY = 0.02
"""Seconds from one probe to the next."""
WORDS = ("one", "two", "three", "ocean", "mountain", "paper", "green", "walks", "under", "between")


def watch(seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each answer, by path."""
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    end, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        path, began = PATHS[number % len(PATHS)], time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=60) as reply:
            reply.read()
        taken = time.perf_counter() - began
        found[path].append(taken * 1e3)
        number += 1
        time.sleep(max(0.0, EVERY - taken))
    return found


async def post(data: bytes) -> int:
    """Send a body, read the answer to its end; returns its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    status = int((await reader.readline()).split()[1])
    while await reader.read(1 << 16):
        pass
    writer.close()
    return status


def good(draw: random.Random) -> bytes:
    """A stream after a prompt of some 6,000 tokens, another one each time."""
    prompt = " ".join(draw.choice(WORDS) for _ in range(6000))
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
    return json.dumps(body).encode()


def bad(draw: random.Random) -> bytes:
    """Something that is refused, at various costs."""
    kinds = (
        b"{" * 1000,
        json.dumps({"model": "smollm2", "prompt": "word " * 1_000_000}).encode(),
        json.dumps({"model": "smollm2", "prompt": "aé漢" * 400_000}).encode(),
        json.dumps({"model": "smollm2", "prompt": [[5] * 100] * 20_000}).encode(),
        json.dumps({"model": "smollm2", "prompt": [10**9] * 200_000}).encode(),
        b'{"prompt": ' + b"[" * 500_000,
        json.dumps({f"key{number}": number for number in range(200_000)}).encode(),
        json.dumps({"model": "smollm2", "prompt": "x", "stop": ["y" * 100_000] * 40}).encode(),
    )
    return draw.choice(kinds)


async def load(streams: int, until: asyncio.Task[None]) -> tuple[int, int]:
    """Keep so many streams running and bad requests coming until a task ends; returns how many were answered."""
    answered = [0, 0]

    async def repeat(place: int, seed: int) -> None:
        draw = random.Random(seed)
        while not until.done():
            status = await post(bad(draw) if place else good(draw))
            if (status < 400) == bool(place):
                raise SystemExit(f"a {'bad' if place else 'good'} request was answered with {status}")
            answered[place] += 1

    tasks = [asyncio.create_task(repeat(0, seed)) for seed in range(streams)]
    tasks += [asyncio.create_task(repeat(1, 1000 + seed)) for seed in range(2)]
    await until
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    return answered[0], answered[1]


async def measure(streams: int, seconds: float) -> dict[str, list[float]]:
    arguments = [sys.executable, __file__, "--watch", str(seconds)]

    async def wait(process: subprocess.Popen[bytes]) -> None:
        await asyncio.to_thread(process.wait)

    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        good_ones, bad_ones = await load(streams, asyncio.create_task(wait(process)))
        output, _ = process.communicate()
    print(f"  {good_ones} streams ended and {bad_ones} requests were refused meanwhile")
    found: dict[str, list[float]] = json.loads(output)
    return found


def show(times: Sequence[float]) -> str:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"{len(times):5} answers, p50 {statistics.median(times):6.1f} ms, p99 {p99:6.1f} ms, max {ordered[-1]:6.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--watch", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch is not None:
        print(json.dumps(watch(options.watch)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with server(f"{COMMAND}{options.replicas}{CACHE}", PORT, "/readyz", 300):
        for streams in (0, options.streams):
            print(f"{options.replicas} replica(s), {streams} streams:")
            seconds = options.seconds if streams else min(5.0, options.seconds)
            found = asyncio.run(measure(streams, seconds)) if streams else watch(seconds)
            for path, times in found.items():
                print(f"  {path:9} {show(times)}", flush=True)


if __name__ == "__main__":
    main()
