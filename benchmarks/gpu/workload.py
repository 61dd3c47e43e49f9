"""The work of every figure: the same random tokens and lengths for every engine.

``offline_requests`` draws in the order of nano-vllm's benchmark, so that its figures can be set beside these: all
prompts first, each length before its tokens, then all output lengths.
"""

from __future__ import annotations

import random

LARGEST_ID = 10000


def offline_requests(count: int = 256, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts of 100 to 1024 tokens, and how many tokens each one is to bring: 100 to 1024."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, LARGEST_ID) for _ in range(draw.randint(100, 1024))] for _ in range(count)]
    return prompts, [draw.randint(100, 1024) for _ in range(count)]


def equal_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens."""
    draw = random.Random(seed)
    return [[draw.randint(0, LARGEST_ID) for _ in range(length)] for _ in range(count)]
