"""A mixture over two devices, whole engines: experts that each device has a part of, spread whole, and in microbatches.

The shape is that of Qwen3-30B-A3B with 12 of its layers. Prints milliseconds of decode steps below and above the number
of tokens from which steps are cut, and prompt tokens a second. Below it microbatches may cost at most 2%.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import decode_step
import prefill
from engines import Ours
from models import model_folder

SPREAD: dict[str, Any] = {"enable_expert_parallel": True, "all_to_all": "peer"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cut experts": {},
    "spread, summed": {"enable_expert_parallel": True},
    "peer": SPREAD,
    "peer, microbatches": {**SPREAD, "enable_dbo": True},
}


def main() -> None:
    """A row a layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-moe")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(given.model, Path(root))
        for name, options in LAYOUTS.items():
            engine = Ours(folder, tensor_parallel_size=2, executor="mp", comm="nccl", **options)
            with engine.llm:
                figures = {**decode_step.measure(engine), **prefill.measure(engine)}
            print(f"{name:20}" + "".join(f"   {key} {value:9.2f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
