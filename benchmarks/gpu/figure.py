"""Runs figures: one alone, or several on one engine; each engine in a process that has done nothing before."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines import Engine, Ours, Peer
from models import SHAPES, model_folder

Measure = Callable[..., dict[str, float]]
MARK = "FIGURES "


def build(engine: str, model: str) -> Engine:
    """``ours`` or ``peer`` with a model of public shape."""
    folder = model_folder(model, Path(tempfile.gettempdir()) / "fourfold-shapes")
    return Ours(folder) if engine == "ours" else Peer(folder)


def run_alone(measure: Measure) -> None:
    """The command line of one figure."""
    parser = argparse.ArgumentParser(description=inspect.getmodule(measure).__doc__)  # type: ignore[union-attr]
    parser.add_argument("--engine", choices=["ours", "peer"], default="ours")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    options = parser.parse_args()
    engine = build(options.engine, options.model)
    for name, value in call(measure, engine, options.model).items():
        print(f"{options.model:14} {name:24} {value:12.4g}")


def call(measure: Measure, engine: Engine, model: str) -> dict[str, float]:
    """``measure``, which may want to know the model."""
    wants_model = "model" in inspect.signature(measure).parameters
    return measure(engine, model) if wants_model else measure(engine)


def in_child(engine: str, model: str, figures: Sequence[str], *, site: str | None, timeout: float) -> dict[str, float]:
    """Several figures on one engine in a process of its own; what it measured before it failed counts."""
    script = Path(__file__).with_name("run_all.py")
    command = [sys.executable, str(script), "--one", engine, "--models", model, "--figures", ",".join(figures)]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        if site is not None:
            environment["PYTHONPATH"] = site
        found: dict[str, float] = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            stop = _Alarm(child, timeout)
            for line in child.stdout or ():
                if line.startswith(MARK):
                    found |= json.loads(line.removeprefix(MARK))
                else:
                    print(f"  [{engine} {model}] {line}", end="", flush=True)
            stop.cancel()
        if child.returncode:
            print(f"  [{engine} {model}] ended with {child.returncode}", flush=True)
    return found


class _Alarm:
    """Ends a child that takes too long."""

    def __init__(self, child: subprocess.Popen[Any], seconds: float) -> None:
        import threading

        self._timer = threading.Timer(seconds, child.kill)
        self._timer.start()

    def cancel(self) -> None:
        """It has ended."""
        self._timer.cancel()
