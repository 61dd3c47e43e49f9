"""A decode step of 8, 32 and 128 greedy requests after prompts of 128 tokens: milliseconds."""

from __future__ import annotations

from engines import Engine
from figure import run_alone
from workload import equal_prompts

STEPS = 128


def measure(engine: Engine, repetitions: int = 2) -> dict[str, float]:
    """Best of the repetitions; runs of one token take the prompts' share off."""
    figures = {}
    for batch in (8, 32, 128):
        prompts = equal_prompts(batch, 128, 7 * batch)
        engine.generate(prompts, [8] * batch, 0.0)
        first = min(engine.generate(prompts, [1] * batch, 0.0) for _ in range(repetitions))
        whole = min(engine.generate(prompts, [1 + STEPS] * batch, 0.0) for _ in range(repetitions))
        figures[f"step_{batch}_ms"] = 1e3 * (whole - first) / STEPS
    return figures


if __name__ == "__main__":
    run_alone(measure)
