"""A decode step of 256 requests at 1k of context, beside its floor; for ours alone, whose steps can be watched."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

from engines import Ours
from figure import run_alone
from models import SHAPES
from workload import equal_prompts

BATCH, CONTEXT, STEPS = 256, 1024, 48


def measure(engine: Ours, model: str) -> dict[str, float]:
    """Median step; the context is what the steps have on average."""
    intervals = step_intervals(engine, equal_prompts(BATCH, CONTEXT - STEPS // 2, 3), STEPS)
    milliseconds = 1e3 * median(intervals[4:-2])
    floor = 1e3 * SHAPES[model].step_floor(BATCH, CONTEXT)
    return {"step_256_1k_ms": milliseconds, "step_256_1k_floor_ms": floor, "step_256_1k_share": floor / milliseconds}


def step_intervals(engine: Ours, prompts: list[list[int]], tokens: int) -> list[float]:
    """Seconds between the steps that bring a token to every prompt."""
    from fourfold import SamplingParams
    from fourfold.messages import AddRequest

    core: Any = engine.llm._core
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        core.add(AddRequest(request_id=f"step-{index}", client=0, prompt_token_ids=prompt, sampling=sampling))
    times = []
    while core.has_work:
        outputs = core.step().get(0, ())
        if len(outputs) == len(prompts):
            times.append(time.perf_counter())
    return [later - earlier for earlier, later in pairwise(times)]


if __name__ == "__main__":
    run_alone(measure)
