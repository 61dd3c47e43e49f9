"""What Ray costs an engine of two ranks on this host: offline tokens/s and start of ``ray`` beside ``mp``.

``python benchmarks/executor_ray.py [--repetitions 3]``. The cluster is one that the engine starts itself, so its start
counts. Each engine has a process of its own and they take turns. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

from offline import in_child
from workload import prompts, spread

EXECUTORS = ("mp", "ray")


def measure_here(executor: str, seed: int) -> dict[str, list[float]]:
    """Start one engine in this process and run the offline workload once: 32 prompts of 128 tokens, 64 of output."""
    from fourfold import LLM, SamplingParams

    os.environ.pop("RAY_ADDRESS", None)
    start = time.perf_counter()
    with LLM("smollm2", dtype="bfloat16", max_model_len=2048, executor=executor, tensor_parallel_size=2) as llm:
        figures = {"start_s": [time.perf_counter() - start]}
        greedy = lambda tokens: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)  # noqa: E731
        llm.generate(prompts(4, 128, 999), greedy(8))
        start = time.perf_counter()
        llm.generate(prompts(32, 128, seed), greedy(64))
        figures["throughput_tok_s"] = [32 * 64 / (time.perf_counter() - start)]
        start = time.perf_counter()
        llm.generate(prompts(1, 16, seed), greedy(65))
        figures["one_stream_ms"] = [(time.perf_counter() - start) / 65 * 1e3]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("EXECUTOR", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print("FIGURES " + json.dumps(measure_here(options.only[0], int(options.only[1]))))
        return
    found: dict[str, dict[str, list[float]]] = {executor: {} for executor in EXECUTORS}
    for seed in range(options.repetitions):
        for executor in EXECUTORS:
            figures = in_child(sys.executable, [__file__, "--only", executor, str(seed)], {})
            for figure, values in figures.items():
                found[executor].setdefault(figure, []).extend(values)
    for figure, floor in found["mp"].items():
        for executor, figures in found.items():
            ratio = statistics.median(figures[figure]) / statistics.median(floor)
            print(f"{figure:17} {executor:4} {spread(figures[figure]):26} {ratio:5.2f}x of mp")


if __name__ == "__main__":
    main()
