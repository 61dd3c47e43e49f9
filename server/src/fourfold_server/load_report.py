"""What a load run measured, as numbers, JSON and a table. Knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fourfold_server.load_client import Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Of any number of values; linear between neighbours, 0 of none."""
        ordered = sorted(seconds) or [0.0]
        return cls(p50=_percentile(ordered, 50), p90=_percentile(ordered, 90), p99=_percentile(ordered, 99))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """A load run."""

    completed: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    """Between two parts of one answer."""
    time_per_output_token: Percentiles
    """From the first part to the last, by token."""
    request_latency: Percentiles
    first_error: str | None

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> Self:
        """From all requests of a run; failed ones count only as such."""
        done = [timing for timing in timings if timing.error is None and timing.events]
        seconds = max((t.end for t in timings), default=0.0) - min((t.start for t in timings), default=0.0)
        output_tokens = sum(timing.output_tokens for timing in done)
        return cls(
            completed=len(done),
            failed=len(timings) - len(done),
            seconds=seconds,
            prompt_tokens=sum(timing.prompt_tokens for timing in done),
            output_tokens=output_tokens,
            output_tokens_per_second=output_tokens / seconds if seconds else 0.0,
            requests_per_second=len(done) / seconds if seconds else 0.0,
            time_to_first_token=Percentiles.of([t.events[0] - t.start for t in done]),
            inter_token_latency=Percentiles.of([b - a for t in done for a, b in zip(t.events, t.events[1:])]),
            time_per_output_token=Percentiles.of(
                [(t.events[-1] - t.events[0]) / (t.output_tokens - 1) for t in done if t.output_tokens > 1]
            ),
            request_latency=Percentiles.of([t.end - t.start for t in done]),
            first_error=next((timing.error for timing in timings if timing.error is not None), None),
        )

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        counts = [
            ("requests completed", str(self.completed)),
            ("requests failed", str(self.failed)),
            ("seconds", f"{self.seconds:.2f}"),
            ("prompt tokens", str(self.prompt_tokens)),
            ("output tokens", str(self.output_tokens)),
            ("output tokens per second", f"{self.output_tokens_per_second:.1f}"),
            ("requests per second", f"{self.requests_per_second:.2f}"),
        ]
        latencies = [
            ("time to first token", self.time_to_first_token),
            ("inter-token latency", self.inter_token_latency),
            ("time per output token", self.time_per_output_token),
            ("request latency", self.request_latency),
        ]
        return counts + [
            (f"{name}, ms (p50 p90 p99)", f"{values.p50:.1f} {values.p90:.1f} {values.p99:.1f}")
            for name, values in latencies
        ]


def _percentile(ordered: Sequence[float], percent: float) -> float:
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return (ordered[low] + (ordered[high] - ordered[low]) * (position - low)) * 1000
