"""Compiles kernels before their first use, each in a thread of its own; Triton compiles without holding Python's lock.

It all lands in Triton's caches, so nothing depends on it: a kernel that is not ready is compiled when started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch

from fourfold_kernels_triton.launch import note_compilation, triton_options
from fourfold_kernels_triton.lone_parser import parse_one_at_a_time


def compile_instead(device: torch.device) -> Callable[..., None]:
    """What takes the place of ``launch`` in a run on meta tensors: compiles what would be started.

    Equal starts are compiled once a process. The first real ``launch`` of a kernel waits for what is compiled of it.
    """
    parse_one_at_a_time()

    def start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        kinds = tuple(one.dtype if isinstance(one, torch.Tensor) else one for one in args)
        _start(device, kernel, grid, kinds, tuple(triton_options(options).items()))

    return start


@functools.cache
def _start(
    device: torch.device, kernel: Any, grid: tuple[int, ...], kinds: tuple[Any, ...], options: Iterable[Any]
) -> None:
    future: Future[None] = Future()

    def run() -> None:
        try:
            with torch.cuda.device(device):
                kernel.warmup(*kinds, grid=grid, **dict(options))
            future.set_result(None)
        except Exception as error:  # the first use raises what is wrong
            future.set_exception(error)

    note_compilation(kernel, future)
    Thread(target=run, name=f"compile {kernel.__name__}", daemon=True).start()
