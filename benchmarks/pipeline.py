"""Pipeline parallelism on the embedded model: two stages of one thread beside one rank and tensor parallelism.

Throughput of the offline workload (128 -> 128), the share of time in which stages wait beside what the same partition
allows at best, and even against uneven batches: ``python benchmarks/pipeline.py [--repetitions 3]``. Run nothing
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workload import prompts, spread

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one thread": ({}, {"OMP_NUM_THREADS": "1"}),
    "two threads": ({}, {"OMP_NUM_THREADS": "2"}),
    "tp=2": ({"tensor_parallel_size": 2}, {"OMP_NUM_THREADS": "1"}),
    "pp=2": ({"pipeline_parallel_size": 2}, {"OMP_NUM_THREADS": "1"}),
}
PEERS = ("one thread", "two threads", "tp=2")


def measure(options: dict[str, Any], repetitions: int, counts: list[int]) -> dict[str, Any]:
    """Tokens a second for each number of requests, and how busy the stages were at the largest."""
    from fourfold import LLM

    figures: dict[str, Any] = {}
    with LLM("smollm2", dtype="bfloat16", max_model_len=2048, max_num_seqs=max(counts), **options) as llm:
        warm_up(llm)
        for count in counts:
            before = stages(llm)
            figures[str(count)] = [
                128 * count / seconds(llm, prompts(count, 128, seed), [128] * count) for seed in range(repetitions)
            ]
            figures[f"stages {count}"] = [after - earlier for after, earlier in zip(stages(llm), before)]
        figures["layers"] = [stage.last_layer - stage.first_layer + 1 for stage in llm._ready.stages]
    return figures


def mixed(repetitions: int, *, even: bool) -> dict[str, Any]:
    """Output tokens a second of 48 short prompts with long answers, then 24 long prompts with short ones.

    Uneven: a step takes whatever is ready, as much as fits, as engines do that only count tokens.
    """
    from fourfold import LLM

    with LLM("smollm2", dtype="bfloat16", max_model_len=2048, pipeline_parallel_size=2) as llm:
        if not even:
            scheduler = llm._core._scheduler
            scheduler._share = lambda num_decoding: num_decoding
            scheduler._max_num_tokens = 1024
        warm_up(llm)
        found = []
        for seed in range(repetitions):
            lengths = [(16, 128)] * 48 + [(384, 16)] * 24
            ids = [prompts(1, length, 100 * seed + index)[0] for index, (length, _) in enumerate(lengths)]
            wanted = [tokens for _, tokens in lengths]
            found.append(sum(wanted) / seconds(llm, ids, wanted))
    return {"mixed": found}


def warm_up(llm: Any) -> None:
    """Once through the batch sizes that will come, so that every step is recorded."""
    seconds(llm, prompts(4, 128, 999), [8] * 4)
    seconds(llm, prompts(64, 16, 998), [4 + index for index in range(64)])


def seconds(llm: Any, ids: list[list[int]], tokens: list[int]) -> float:
    from fourfold import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
    start = time.perf_counter()
    llm.generate(ids, params)
    return time.perf_counter() - start


def stages(llm: Any) -> list[float]:
    """Seconds with steps in the air, then the busy seconds of every stage; at the last time they were asked."""
    stats = llm._core.stats
    return [stats.pipeline_seconds, *(stats.stage_busy_seconds or [0.0, 0.0])]


def in_child(name: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """One engine in a process of its own, so that none inherits another's threads or memory."""
    command = [sys.executable, str(Path(__file__)), "--only", name, "--repetitions", str(options.repetitions)]
    command += ["--requests", *map(str, options.requests)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment).stdout
    [line] = [line for line in out.splitlines() if line.startswith("FIGURES ")]
    return json.loads(line.removeprefix("FIGURES "))


def show_throughput(found: dict[str, dict[str, Any]], counts: list[int]) -> None:
    print(f"{'output tokens/s':20} {'min / median / max':26}" + "".join(f" {'to ' + peer:>14}" for peer in PEERS))
    for count in counts:
        for name, figures in found.items():
            medians = {peer: statistics.median(found[peer][str(count)]) for peer in PEERS}
            own = figures[str(count)]
            ratios = "".join(f" {statistics.median(own) / medians[peer]:13.2f}x" for peer in PEERS)
            print(f"{count:4} at {name:12} {spread(own):26}{ratios}")


def show_bubbles(figures: dict[str, Any], counts: list[int]) -> None:
    layers = ",".join(map(str, figures["layers"]))
    for count in counts:
        wall, *busy = figures[f"stages {count}"]
        waits = [1 - one / wall for one in busy]
        # At best the slowest stage never waits, and the others wait for it.
        best = [1 - one / max(busy) for one in busy]
        print(
            f"{count:4} bubble share of stages {layers}: {' '.join(f'{one:.1%}' for one in waits)}, mean "
            f"{statistics.mean(waits):.1%}; at best {' '.join(f'{one:.1%}' for one in best)}, mean "
            f"{statistics.mean(best):.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--parts", nargs="+", choices=["throughput", "mixed"], default=["throughput", "mixed"])
    parser.add_argument("--only", choices=[*LAYOUTS, "even", "uneven"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only in ("even", "uneven"):
        print("FIGURES " + json.dumps(mixed(options.repetitions, even=options.only == "even")))
        return
    if options.only:
        print("FIGURES " + json.dumps(measure(LAYOUTS[options.only][0], options.repetitions, options.requests)))
        return
    if "throughput" in options.parts:
        found = {name: in_child(name, options, environment) for name, (_, environment) in LAYOUTS.items()}
        show_throughput(found, options.requests)
        show_bubbles(found["pp=2"], options.requests)
    if "mixed" in options.parts:
        even, uneven = (in_child(name, options, {"OMP_NUM_THREADS": "1"})["mixed"] for name in ("even", "uneven"))
        ratio = statistics.median(even) / statistics.median(uneven)
        print("short and long requests together, output tokens/s (min / median / max):")
        print(f"even batches {spread(even)}, uneven {spread(uneven)}: {ratio:.2f}x")


if __name__ == "__main__":
    main()
