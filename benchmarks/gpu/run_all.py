"""Every figure of the GPU on one machine, and one table: ours, the peer, their ratio and what we aim for.

``python benchmarks/gpu/run_all.py [--models qwen3-0.6b,...] [--peer-site DIR]``. The peer's figures are those of
``peer_figures.py``, or with --peer-site, a folder that holds vLLM, measured in the same run. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from importlib import import_module

from figure import MARK, build, call, in_child
from peer_figures import AIMS, RECORDED

FIGURES = ["start", "single_stream", "decode_step", "throughput", "prefill", "large_step", "idle_share"]
OURS_ALONE = {"large_step", "idle_share"}
MODELS = ["qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--figures", default=",".join(FIGURES))
    parser.add_argument("--peer-site", help="a folder with vLLM to measure beside ours")
    parser.add_argument("--peer-models", default="qwen3-0.6b", help="the models that the peer is measured with")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one engine and model")
    parser.add_argument("--one", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    figures, models = options.figures.split(","), options.models.split(",")
    if options.one:
        _run_one(options.one, models[0], figures)
        return
    rows: list[tuple[str, str, float, float | None, str]] = []
    for model in models:
        ours = in_child("ours", model, figures, site=None, timeout=options.timeout)
        peer = dict(RECORDED.get(model, {}))
        source = "recorded"
        if options.peer_site and model in options.peer_models.split(","):
            theirs = [figure for figure in figures if figure not in OURS_ALONE]
            peer |= in_child("peer", model, theirs, site=options.peer_site, timeout=options.timeout)
            source = "same run"
        rows += [(model, name, value, peer.get(name), source) for name, value in ours.items()]
    _print_table(rows)


def _run_one(engine_name: str, model: str, figures: list[str]) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(relativeCreated)6d ms: %(message)s"
    )  # what the engine chose is part of the record
    engine = build(engine_name, model)
    for figure in figures:
        began = time.perf_counter()
        print(MARK + json.dumps(call(import_module(figure).measure, engine, model)), flush=True)
        print(f"{figure} took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _print_table(rows: list[tuple[str, str, float, float | None, str]]) -> None:
    print(f"\n{'model':14} {'figure':22} {'ours':>10} {'peer':>10} {'ratio':>7}  {'aim':16} peer is")
    for model, name, value, other, source in rows:
        ratio = f"{value / other:6.2f}x" if other else ""
        shown = f"{other:10.4g}" if other else " " * 10
        aim = AIMS.get((model, name), AIMS.get(("", name), ""))
        print(f"{model:14} {name:22} {value:10.4g} {shown} {ratio:>7}  {aim:16} {source if other else ''}")


if __name__ == "__main__":
    main()
