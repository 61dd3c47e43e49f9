"""Round trip of one call to two ranks that are processes, beside a floor: a bare pipe echo to two processes.

Prints microseconds at the median and the 99th percentile and the ratio of the medians, then what idle ranks burn.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.entries import ExecutorContext
from fourfold.plugins import load_plugins

WARM_UP = 200
ECHO = "import os\nwhile message := os.read(0, 4096): os.write(1, message)"


def measure(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Microseconds at the median and the 99th percentile."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    times.sort()
    return times[count // 2] * 1e6, times[count * 99 // 100] * 1e6


def measure_pipes(ranks: int, count: int) -> tuple[float, float]:
    """A message through a pipe to each of ``ranks`` processes and back through another one."""
    children = [
        subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for _ in range(ranks)
    ]
    ways = [(child.stdin.fileno(), child.stdout.fileno()) for child in children]
    message = bytes(64)

    def call() -> None:
        for to, _ in ways:
            os.write(to, message)
        for _, back in ways:
            os.read(back, 4096)

    try:
        return measure(call, count)
    finally:
        for child in children:
            child.stdin.close()
            child.wait()
            child.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", default="mp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--idle-seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    floor = measure_pipes(arguments.ranks, arguments.count)
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=arguments.ranks))
    context = ExecutorContext(
        config=config, layout=config.parallel.layout, worker="fourfold.testing.workers:EchoWorker"
    )
    executor = load_plugins().executors()[arguments.executor].build(context)
    try:
        step = bytes(64)
        rows = {
            "bare pipe echo": floor,
            "collective_rpc": measure(lambda: executor.collective_rpc("identity", args=(step,)), arguments.count),
            "one rank replies": measure(
                lambda: executor.collective_rpc("identity", args=(step,), reply_rank=0), arguments.count
            ),
            "as a future": measure(
                lambda: executor.collective_rpc("identity", args=(step,), reply_rank=0, non_block=True).result(),
                arguments.count,
            ),
        }
        processes = [psutil.Process(), *psutil.Process().children()]
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        threading.Event().wait(arguments.idle_seconds)
        idle = sum(sum(process.cpu_times()[:2]) for process in processes) - before
    finally:
        executor.shutdown()
    print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, (median, tail) in rows.items():
        print(f"{name:18} p50 {median:7.0f} us   p99 {tail:7.0f} us   {median / floor[0]:5.2f}x the floor")
    print(f"idle: {idle / arguments.idle_seconds:.1%} of a core")


if __name__ == "__main__":
    main()
