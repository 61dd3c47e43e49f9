"""The device function that every attention kernel shares: what a score is."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.activations import tanh


@triton.jit
def scaled(products, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores in base 2: what tl.exp2 takes where the softmax is written with exp."""
    if SOFT_CAP:
        scores = (soft_cap * 1.4426950408889634) * tanh(products * (scale / soft_cap))  # 1 / ln(2)
    else:
        scores = products * (scale * 1.4426950408889634)
    return scores
