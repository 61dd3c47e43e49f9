"""16 prompts of 2048 tokens, one token each: prompt tokens a second."""

from __future__ import annotations

from engines import Engine
from figure import run_alone
from workload import equal_prompts

PROMPTS, LENGTH = 16, 2048


def measure(engine: Engine, repetitions: int = 2) -> dict[str, float]:
    """Best of the repetitions, after one that is not counted."""
    prompts = equal_prompts(PROMPTS, LENGTH, 5)
    engine.generate(prompts, [1] * PROMPTS, 0.0)
    seconds = min(engine.generate(prompts, [1] * PROMPTS, 0.0) for _ in range(repetitions))
    return {"prefill_tok_s": PROMPTS * LENGTH / seconds}


if __name__ == "__main__":
    run_alone(measure)
