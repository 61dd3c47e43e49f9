"""HTTP figures on the embedded model at a concurrency: throughput, first token, between tokens, start, memory.

``python benchmarks/serving.py [--concurrency 16 --requests 64] [--peer-command '... --port {port}']``. The peer is any
OpenAI-compatible server, started after ours has ended and given the same requests. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from workload import prompts, spread

OURS = f"{Path(sys.executable).parent / 'fourfold'} serve smollm2 --dtype bfloat16 --max-model-len 2048 --port {{port}}"


@dataclass
class Sample:
    """One request: when it was sent, and when each token event came."""

    sent: float
    events: list[float] = field(default_factory=list)


@contextmanager
def server(command: str, port: int, probe: str, deadline: float) -> Iterator[tuple[psutil.Process, float]]:
    """A running server and the seconds it took until ``probe`` answered 200."""
    start = time.perf_counter()
    process = psutil.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe}", timeout=1):
                    break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None:
                    raise SystemExit(f"{command} ended with status {process.returncode}") from None
                if time.perf_counter() - start > deadline:
                    raise SystemExit(f"{command} was not ready within {deadline} s") from None
                time.sleep(0.02)
        yield process, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(30)


async def request(port: int, model: str, prompt: list[int], tokens: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n"
    sample = Sample(sent=time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200" not in status:
        raise SystemExit((status + await reader.read(2000)).decode(errors="replace"))
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            sample.events.append(time.perf_counter())
    writer.close()
    return sample


async def load(port: int, model: str, ids: list[list[int]], tokens: int, concurrency: int) -> list[Sample]:
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Sample:
        async with gate:
            return await request(port, model, prompt, tokens)

    return list(await asyncio.gather(*map(one, ids)))


def measure(command: str, port: int, model: str, probe: str, options: argparse.Namespace) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    with server(command, port, probe, 300) as (process, seconds):
        figures["ready_s"] = [seconds]
        asyncio.run(load(port, model, prompts(4, 128, 999), 8, 4))
        for seed in range(options.repetitions):
            start = time.perf_counter()
            samples = asyncio.run(load(port, model, prompts(options.requests, 128, seed), 128, options.concurrency))
            elapsed = time.perf_counter() - start
            first = [(sample.events[0] - sample.sent) * 1e3 for sample in samples]
            between = [(b - a) * 1e3 for s in samples for a, b in zip(s.events, s.events[1:])]
            for name, value in (
                ("tok_s", options.requests * 128 / elapsed),
                ("ttft_p50_ms", statistics.median(first)),
                ("itl_p50_ms", statistics.median(between)),
                ("itl_p99_ms", sorted(between)[int(len(between) * 0.99)]),
            ):
                figures.setdefault(name, []).append(value)
        tree = [process, *process.children(recursive=True)]
        figures["processes"] = [len(tree)]
        figures["rss_gb"] = [sum(child.memory_info().rss for child in tree) / 1e9]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--command", default=OURS)
    parser.add_argument("--peer-command", help="starts an OpenAI-compatible server on {port}")
    parser.add_argument("--peer-model", default="m")
    parser.add_argument("--peer-probe", default="/health")
    options = parser.parse_args()
    ours = measure(options.command, 18431, "smollm2", "/readyz", options)
    peer = {}
    if options.peer_command:
        peer = measure(options.peer_command, 18432, options.peer_model, options.peer_probe, options)
    print(f"{'figure':14} {'ours min / median / max':28} {'peer':>9} {'ours/peer':>9}")
    for name, values in ours.items():
        row = f"{name:14} {spread(values):28}"
        if name in peer:
            other = statistics.median(peer[name])
            row += f" {other:9.1f} {statistics.median(values) / other:8.2f}x"
        print(row)


if __name__ == "__main__":
    main()
