"""The one way to start a kernel. Knows no kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on the current stream; a grid without programs starts nothing.

    ``options`` are the kernel's constexpr parameters and Triton's own (``num_warps``, ``num_stages``). A product and a
    sum may become one fused operation unless ``enable_fp_fusion=False``: Triton's default differs between versions.
    With ``EARLY=True`` programs start while the kernel before still runs, and wait for it themselves.
    """
    if 0 not in grid:
        kernel[grid](*args, **triton_options(options))


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
