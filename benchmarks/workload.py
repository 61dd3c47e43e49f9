"""The fixed workload of every benchmark: random token ids, a new seed per repetition, so that no prefix cache hits."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

FIRST_ID, LAST_ID = 1000, 48000
"""Plain text tokens of the embedded model; specials lie below."""


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids."""
    draw = random.Random(1234567 + seed)
    return [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def spread(values: Sequence[float]) -> str:
    """``min / median / max`` of the repetitions."""
    return f"{min(values):.1f} / {statistics.median(values):.1f} / {max(values):.1f}"
