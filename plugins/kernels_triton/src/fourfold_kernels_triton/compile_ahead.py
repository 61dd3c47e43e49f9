"""Compiles kernels before their first use, each in a thread of its own; Triton compiles without holding Python's lock.

It all lands in Triton's caches, so nothing depends on it: a kernel that is not ready is compiled when started.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, Final

import torch

from fourfold_kernels_triton.launch import triton_options

DEADLINE: Final = 120.0
"""Seconds to wait for kernels; after that the first use compiles them."""


class Compilation:
    """Takes the place of ``launch`` in a run on meta tensors: notes what would be started, and compiles it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._futures: list[Future[None]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """As ``launch``; equal starts are compiled once a process."""
        kinds = tuple(one.dtype if isinstance(one, torch.Tensor) else one for one in args)
        self._futures.append(_start(self._device, kernel, grid, kinds, tuple(triton_options(options).items())))

    def wait(self) -> None:
        """Until all is compiled, or failed: the first use raises what is wrong."""
        wait(self._futures, timeout=DEADLINE)
        self._futures.clear()


@functools.cache
def _start(
    device: torch.device, kernel: Any, grid: tuple[int, ...], kinds: tuple[Any, ...], options: Iterable[Any]
) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            with torch.cuda.device(device):
                kernel.warmup(*kinds, grid=grid, **dict(options))
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, name=f"compile {kernel.__name__}", daemon=True).start()
    return future
