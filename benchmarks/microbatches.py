"""Two microbatches over a link that sleeps: their time against the event model and against one whole batch.

Computing sleeps too, so that only the handing over costs anything. Aims where both take equally long: at most 1.25x of
the model, and at least 1.6x as fast as the whole batch. ``benchmarks/gpu/microbatches.py`` measures real links.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.step_part import StepVote
from fourfold.testing.modelled_link import ModelledLink, overlapped_seconds
from fourfold_moe_ep.overlap import Overlap

NUM_SUMS = 24
TOKENS = 8
CASES = ((0.010, 0.010), (0.016, 0.004), (0.004, 0.016))
"""Seconds of a microbatch between two sums, and of its sum."""


class SleepingClock:
    """See ``fourfold.testing.modelled_link.Clock``."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - self.now()))


def seconds(compute: float, travel: float, *, microbatches: bool) -> float:
    """Of a step of ``TOKENS``; a whole batch computes and sums twice as long."""
    clock = SleepingClock()
    link = ModelledLink(clock, travel if microbatches else 2 * travel)
    overlap = Overlap(ParallelConfig(enable_dbo=microbatches, dbo_prefill_tokens=2))
    overlap.expect_sums(link)  # type: ignore[arg-type]
    overlap.begin_step(TOKENS, StepVote(has_work=True, may_pause=False), is_decode=False)

    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_SUMS):
            clock.wait(clock.now() + 2 * compute * len(x) / TOKENS)
            x = overlap.all_reduce(link, x)  # type: ignore[arg-type]
        return x

    tokens = torch.ones(TOKENS)
    turns: Callable[..., object] | None = overlap.take_turns(TOKENS)
    started = clock.now()
    if turns is None:
        body(tokens)
    else:
        turns([partial(body, tokens[: TOKENS // 2]), partial(body, tokens[TOKENS // 2 :])])
    return clock.now() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    for compute, travel in CASES:
        whole, turns = (
            statistics.median(seconds(compute, travel, microbatches=microbatches) for _ in range(arguments.repetitions))
            for microbatches in (False, True)
        )
        model = overlapped_seconds(NUM_SUMS, compute, travel)
        print(
            f"computing {compute * 1e3:3.0f} ms, link {travel * 1e3:3.0f} ms   in turns {turns * 1e3:4.0f} ms"
            f"   {turns / model:.2f}x of the model   {whole / turns:.2f}x as fast as at once"
        )


if __name__ == "__main__":
    main()
