"""What this machine can do at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

PARAMETERS = 134.5e6
"""Of the embedded model; each is read once a token and costs two operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floors:
    """Measured limits, and what follows for the embedded model in bfloat16."""

    read_gigabytes: float
    """GB/s of reading memory, all threads."""
    product_gigaflops: float
    """GFLOP/s of a bf16 matrix product, all threads."""

    @property
    def decode_milliseconds(self) -> float:
        """One token of one stream: every weight is read once."""
        return PARAMETERS * 2 / self.read_gigabytes / 1e6

    def prefill_milliseconds(self, tokens: int) -> float:
        """A prompt: two operations a parameter and token."""
        return PARAMETERS * 2 * tokens / self.product_gigaflops / 1e6

    def throughput(self, requests: int, prompt: int, output: int) -> float:
        """Output tokens a second of the offline job, compute alone."""
        operations = PARAMETERS * 2 * requests * (prompt + output)
        return requests * output / (operations / self.product_gigaflops / 1e9)


def measure(seconds: float = 1.0) -> Floors:
    """Best of many, within about ``seconds`` for each limit."""
    data = torch.zeros(128 * 2**20, dtype=torch.float32)
    read = data.nbytes / _best(lambda: data.sum(), seconds) / 1e9
    left = torch.randn(2048, 2048).bfloat16()
    right = torch.randn(2048, 2048).bfloat16()
    product = 2 * 2048**3 / _best(lambda: left @ right, seconds) / 1e9
    return Floors(read_gigabytes=read, product_gigaflops=product)


def _best(function: object, seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best
