"""One greedy request after a prompt of 128 tokens: milliseconds a token, and to the first one."""

from __future__ import annotations

from statistics import median

from engines import Engine
from figure import run_alone
from workload import equal_prompts

TOKENS = 512


def measure(engine: Engine, repetitions: int = 3) -> dict[str, float]:
    """Medians; a run of one token takes the prompt's share off."""
    prompts = [equal_prompts(1, 128, 1000 + index) for index in range(repetitions)]
    first = median(engine.generate(prompt, [1], 0.0) for prompt in prompts)
    whole = median(engine.generate(prompt, [TOKENS], 0.0) for prompt in prompts)
    return {"single_ms": 1e3 * (whole - first) / (TOKENS - 1), "first_token_ms": 1e3 * first}


if __name__ == "__main__":
    run_alone(measure)
