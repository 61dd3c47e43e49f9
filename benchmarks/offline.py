"""Offline figures on the embedded model: throughput, prefill, one stream, start, memory.

Beside floors and, if given, vLLM:

``python benchmarks/offline.py [--repetitions 3] [--peer-python PATH --peer-model FOLDER]``. The peer's interpreter must
have vLLM; its figures are taken right after ours, by the same calls. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import psutil
from floors import measure
from workload import prompts, spread


def ours(repetitions: int) -> dict[str, list[float]]:
    from fourfold import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM("smollm2", dtype="bfloat16", max_model_len=2048)
    figures = {"start_s": [time.perf_counter() - start]}
    with llm:
        generate = lambda ids, tokens: llm.generate(  # noqa: E731 - the one call that both engines share
            ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        )
        figures |= run(generate, repetitions)
    figures["rss_gb"] = [psutil.Process().memory_info().rss / 1e9]
    return figures


def peer(repetitions: int, model: str) -> dict[str, list[float]]:
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, seed=0)
    figures = {"start_s": [time.perf_counter() - start]}
    generate = lambda ids, tokens: llm.generate(  # noqa: E731
        [{"prompt_token_ids": prompt} for prompt in ids],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )
    figures |= run(generate, repetitions)
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    figures["rss_gb"] = [sum(process.memory_info().rss for process in tree) / 1e9]
    return figures


def run(generate: object, repetitions: int) -> dict[str, list[float]]:
    """The calls that every engine makes."""
    timed = lambda ids, tokens: _seconds(generate, ids, tokens)  # noqa: E731
    timed(prompts(4, 128, 999), 8)
    throughput = [64 * 128 / timed(prompts(64, 128, seed), 128) for seed in range(repetitions)]
    prefill, long_decode, short_decode = [], [], []
    for seed in range(repetitions + 2):
        first = timed(prompts(1, 512, 5000 + seed), 1)
        prefill.append(first * 1e3)
        long_decode.append((timed(prompts(1, 512, 6000 + seed), 129) - first) / 128 * 1e3)
        first = timed(prompts(1, 16, 7000 + seed), 1)
        short_decode.append((timed(prompts(1, 16, 8000 + seed), 129) - first) / 128 * 1e3)
    return {
        "throughput_tok_s": throughput,
        "prefill512_ms": prefill,
        "decode_ms": short_decode,
        "decode_after512_ms": long_decode,
    }


def _seconds(generate: object, ids: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    generate(ids, tokens)  # type: ignore[operator]
    return time.perf_counter() - start


def in_child(python: str, arguments: list[str], environment: dict[str, str]) -> dict[str, list[float]]:
    """Run a script in a process of its own, so that no engine inherits another's threads or memory; its figures."""
    command = [python, *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment).stdout
    [line] = [line for line in out.splitlines() if line.startswith("FIGURES ")]
    return json.loads(line.removeprefix("FIGURES "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peer-python", help="an interpreter that has vLLM")
    parser.add_argument("--peer-model", help="the embedded model as a bf16 folder, for the peer")
    parser.add_argument("--peer-preload", default="", help="libraries for the peer, such as tcmalloc and libiomp5")
    parser.add_argument("--only", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        figures = ours(options.repetitions) if options.only == "ours" else peer(options.repetitions, options.peer_model)
        print("FIGURES " + json.dumps(figures))
        return
    floors = measure()
    limits = {
        "throughput_tok_s": floors.throughput(64, 128, 128),
        "prefill512_ms": floors.prefill_milliseconds(512),
        "decode_ms": floors.decode_milliseconds,
        "decode_after512_ms": floors.decode_milliseconds,
    }
    common = [__file__, "--repetitions", str(options.repetitions), "--only"]
    mine = in_child(sys.executable, [*common, "ours"], {})
    theirs: dict[str, list[float]] = {}
    if options.peer_python:
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        environment["LD_PRELOAD"] = options.peer_preload
        theirs = in_child(
            options.peer_python, [*common, "peer", "--peer-model", options.peer_model or "smollm2"], environment
        )
    print(f"floors: read {floors.read_gigabytes:.1f} GB/s, bf16 product {floors.product_gigaflops:.0f} GFLOP/s")
    print(f"{'figure':20} {'ours min / median / max':26} {'floor':>8} {'to floor':>9} {'vLLM':>8} {'to vLLM':>8}")
    for name, values in mine.items():
        median = statistics.median(values)
        floor = limits.get(name)
        other = statistics.median(theirs[name]) if name in theirs else None
        cells = [f"{floor:8.1f} {median / floor:8.2f}x" if floor else " " * 18]
        cells.append(f"{other:8.1f} {median / other:7.2f}x" if other else "")
        print(f"{name:20} {spread(values):26} {' '.join(cells)}")


if __name__ == "__main__":
    main()
