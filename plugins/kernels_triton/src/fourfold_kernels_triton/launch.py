"""The one way to start a kernel. Knows no kernel."""

from __future__ import annotations

import functools
from concurrent.futures import Future, wait
from typing import Any, Final

import torch

DEADLINE: Final = 120.0
"""Seconds to wait for a kernel that is being compiled; after that starting it compiles it."""
_COMPILING: Final[dict[Any, list[Future[None]]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on the current stream; a grid without programs starts nothing.

    ``options`` are the kernel's constexpr parameters and Triton's own (``num_warps``, ``num_stages``). A product and a
    sum may become one fused operation unless ``enable_fp_fusion=False``: Triton's default differs between versions.
    With ``EARLY=True`` programs start while the kernel before still runs, and wait for it themselves.
    """
    if 0 not in grid:
        if kernel in _COMPILING:
            settle(kernel)
        kernel[grid](*args, **triton_options(options))


def note_compilation(kernel: Any, future: Future[None]) -> None:
    """Something of ``kernel`` is being compiled, until ``future`` is done."""
    _COMPILING.setdefault(kernel, []).append(future)


def settle(kernel: Any) -> None:
    """Return when all that is being compiled of ``kernel`` is, or has failed."""
    wait(_COMPILING.pop(kernel, ()), timeout=DEADLINE)


def triton_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of ``launch`` as Triton takes them."""
    options.setdefault("enable_fp_fusion", True)
    if options.get("EARLY"):
        options["launch_pdl"] = True
    return options


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launches, the ``EARLY`` of a kernel (from sm_90 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
