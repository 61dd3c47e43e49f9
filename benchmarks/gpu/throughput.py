"""256 requests at once, of mixed lengths, drawn at temperature 0.6: output tokens a second."""

from __future__ import annotations

from engines import Engine
from figure import run_alone
from workload import offline_requests


def measure(engine: Engine, repetitions: int = 2) -> dict[str, float]:
    """The best of the repetitions."""
    prompts, counts = offline_requests()
    return {"throughput_tok_s": sum(counts) / min(engine.generate(prompts, counts, 0.6) for _ in range(repetitions))}


if __name__ == "__main__":
    run_alone(measure)
