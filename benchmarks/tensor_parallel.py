"""What a cut inside the layers costs and gains on this host: offline tokens/s and start of TP=2 beside TP=1.

``python benchmarks/tensor_parallel.py [--repetitions 3]``. TP=1 runs with as many threads as cores, and with one. Each
engine has a process of its own and they take turns, so that a slow minute hits all of them. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from offline import in_child
from workload import prompts, spread

LAYOUTS = {
    "tp=1, all threads": ({}, {}),
    "tp=1, one thread": ({}, {"OMP_NUM_THREADS": "1"}),
    "tp=2": ({"tensor_parallel_size": 2, "executor": "mp"}, {}),
}
"""Name -> options of the engine, environment."""
REFERENCE = "tp=1, all threads"


def measure_here(layout: str, seed: int) -> dict[str, list[float]]:
    """Start one engine in this process and run the offline workload once: 64 prompts of 128 tokens, 128 of output."""
    from fourfold import LLM, SamplingParams

    options, _ = LAYOUTS[layout]
    start = time.perf_counter()
    with LLM("smollm2", dtype="bfloat16", max_model_len=2048, **options) as llm:
        figures = {"start_s": [time.perf_counter() - start]}
        greedy = lambda tokens: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)  # noqa: E731
        llm.generate(prompts(4, 128, 999), greedy(8))
        start = time.perf_counter()
        llm.generate(prompts(64, 128, seed), greedy(128))
        figures["throughput_tok_s"] = [64 * 128 / (time.perf_counter() - start)]
        start = time.perf_counter()
        llm.generate(prompts(1, 16, seed), greedy(129))
        figures["one_stream_ms"] = [(time.perf_counter() - start) / 129 * 1e3]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("LAYOUT", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print("FIGURES " + json.dumps(measure_here(options.only[0], int(options.only[1]))))
        return
    found: dict[str, dict[str, list[float]]] = {layout: {} for layout in LAYOUTS}
    for seed in range(options.repetitions):
        for layout, (_, environment) in LAYOUTS.items():
            figures = in_child(sys.executable, [__file__, "--only", layout, str(seed)], environment)
            for figure, values in figures.items():
                found[layout].setdefault(figure, []).extend(values)
    for figure in found[REFERENCE]:
        floor = statistics.median(found[REFERENCE][figure])
        for layout, figures in found.items():
            ratio = statistics.median(figures[figure]) / floor
            print(f"{figure:17} {layout:18} {spread(figures[figure]):26} {ratio:5.2f}x of {REFERENCE}")


if __name__ == "__main__":
    main()
