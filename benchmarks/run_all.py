"""Runs every benchmark that docs/performance.md quotes, one after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = [
    "kernels_cpu.py",
    "scheduler.py",
    "load_balancers.py",
    "probes.py",
    "offline.py",
    "tensor_parallel.py",
    "serving.py",
    "data_parallel.py",
    "executor_ray.py",
    "startup.py",
    "collective_rpc.py",
    "rpc_over_nodes.py",
    "nodes_apart.py",
    "all_reduce.py",
    "pipeline_transport.py",
    "expert_parallel.py",
    "microbatches.py",
    "latent_cache.py",
    "pipeline.py",
]


def main() -> None:
    for script in SCRIPTS:
        print(f"\n== {script}", flush=True)
        subprocess.run([sys.executable, Path(__file__).parent / script], check=True)


if __name__ == "__main__":
    main()
