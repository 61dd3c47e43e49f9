"""Rows in e4m3 with a scale each, as bytes: D values, then the scale in fp32. The twin of what an fp8 cache holds."""

from __future__ import annotations

from typing import Final

import torch

SCALE_BYTES: Final = 4
LARGEST: Final = 448.0
"""Of e4m3; a row is scaled so that its largest value becomes this."""


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """[..., D] -> uint8 [..., D + SCALE_BYTES]; rounded to the nearest, each row by its own scale."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    # Rounding the quotient up must not leave the range: e4m3 has no infinity, and torch makes it NaN.
    values = (rows / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """What ``pack_rows`` gave -> fp32 [..., D]."""
    values, scales = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:]
    return values.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
