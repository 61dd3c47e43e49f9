"""What a simulated load comes to, in the figures that tell policies apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.simulation.cluster import Outcome

CURVE_POINTS = 200
"""Of a line to draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Times in seconds, shares from 0 to 1."""

    queueing_p50: float
    """From arrival to the first step that computes some of the request."""
    queueing_p99: float
    ttft_p50: float
    """From arrival to the first token."""
    ttft_p99: float
    prompt_tokens_computed: int
    hit_rate: float
    """Prompt tokens that were found in a prefix cache, of all."""
    kept: float | None
    """Turns of conversations that went where the turn before had gone; None without conversations."""
    imbalance: float
    """Tokens still to do on the engine with the most of them, over the average engine's; both on average over time."""
    busy: float
    """Share of the time that engines were in steps."""

    @classmethod
    def of(cls, outcome: Outcome) -> Figures:
        """The figures of one run."""
        load = outcome.workload
        queueing, ttft = outcome.admitted - load.arrival, outcome.first - load.arrival
        total, hits = int(load.prompt_tokens.sum()), int(outcome.hit_tokens.sum())
        most, mean = float(outcome.most_tokens.sum()), float(outcome.mean_tokens.sum())
        return cls(
            queueing_p50=float(np.percentile(queueing, 50)),
            queueing_p99=float(np.percentile(queueing, 99)),
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p99=float(np.percentile(ttft, 99)),
            prompt_tokens_computed=total - hits,
            hit_rate=hits / total,
            kept=_kept(load.conversation, outcome.engine),
            imbalance=most / mean if mean else 1.0,
            busy=float(outcome.busy_seconds.mean() / outcome.finished.max()),
        )


def ttft_curve(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Seconds, and the share of the requests that had their first token within them."""
    shares = np.linspace(0, 1, CURVE_POINTS)
    return np.quantile(outcome.first - outcome.workload.arrival, shares).tolist(), shares.tolist()


def imbalance_curve(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Seconds of the simulation, and the tokens to do on the busiest engine over the average one's about then."""
    ratios = outcome.most_tokens / np.maximum(outcome.mean_tokens, 1.0)
    parts = np.array_split(ratios, max(1, min(CURVE_POINTS, len(ratios))))
    times = np.linspace(0, float(outcome.finished.max()), len(parts))
    return times.tolist(), [float(part.mean()) for part in parts if len(part)]


def _kept(conversation: NDArray[np.int64], engine: NDArray[np.int64]) -> float | None:
    """Of requests that follow another of their conversation, the share that went to the same engine as that."""
    order = np.argsort(conversation, kind="stable")
    talk, place = conversation[order], engine[order]
    follows = (talk[1:] == talk[:-1]) & (talk[1:] >= 0)
    if not follows.any():
        return None
    return float((place[1:] == place[:-1])[follows].mean())
