"""The one way to start a kernel. Knows no kernel."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on the current stream; a grid without programs starts nothing.

    ``options`` are the kernel's constexpr parameters and Triton's own (``num_warps``, ``num_stages``). A product and a
    sum may become one fused operation unless ``enable_fp_fusion=False``: Triton's default differs between versions.
    """
    if 0 in grid:
        return
    options.setdefault("enable_fp_fusion", True)
    kernel[grid](*args, **options)
