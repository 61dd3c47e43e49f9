"""The linear method ``triton``: torch's, but for a few rows, where kernels of its own stream the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from fourfold.layers.torch_linear import DenseWeight, TorchLinearMethod
from fourfold_kernels_triton.kernels.products import few_rows_product, vector_product
from fourfold_kernels_triton.launch import launch, starts_early

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.entries import ComputeContext

MOST_ROWS: Final = 16
"""Rows of one matrix instruction; beyond them a library's product is as fast."""
_COLUMNS: Final = 1024
"""Weights of an output that a program of one row reads at a time."""
_PROGRAMS: Final = 264
"""Programs that a product has at least, where its outputs allow: two for each multiprocessor of an H200."""
_MOST_OUTS: Final = 8
"""Outputs of a program of one row: 16 KB of weights in flight."""
_FEW_ROWS: Final = {"ROWS": MOST_ROWS, "OUTS": 16, "COLUMNS": 256, "num_warps": 4, "num_stages": 5}


class TritonLinearMethod(TorchLinearMethod):
    """See the contract for each method."""

    def __init__(self, context: ComputeContext) -> None:
        super().__init__(context)
        self._early = starts_early(context.device)

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """A few rows by the kernels, as long as they are dense and of the weight's 16-bit dtype; others by torch."""
        if (
            not 1 <= x.shape[0] <= MOST_ROWS
            or not isinstance(weight, DenseWeight)
            or x.dtype != weight.dense.dtype
            or x.dtype.itemsize != 2
            or x.stride(1) != 1
            or weight.in_features % 8
        ):
            return super().apply(weight, x, out_dtype=out_dtype)
        rows, out_features = x.shape[0], weight.out_features
        out = torch.empty((rows, out_features), dtype=out_dtype or x.dtype, device=x.device)
        bias = weight.dense if weight.bias is None else weight.bias
        layer = {"IN": weight.in_features, "OUT": out_features, "BIAS": weight.bias is not None, "EARLY": self._early}
        if rows == 1:
            outs = outs_each(out_features)
            columns = min(_COLUMNS, 1 << (weight.in_features - 1).bit_length())
            grid = (-(-out_features // outs),)
            launch(vector_product, grid, x, weight.dense, bias, out, OUTS=outs, COLUMNS=columns, **layer)
        else:
            grid = (-(-out_features // _FEW_ROWS["OUTS"]),)
            launch(few_rows_product, grid, x, weight.dense, bias, out, x.stride(0), rows, **layer, **_FEW_ROWS)
        return out


def outs_each(out_features: int) -> int:
    """Outputs of one program for one row, a power of two: many, unless that leaves multiprocessors idle."""
    outs = _MOST_OUTS
    while outs > 1 and out_features // outs < _PROGRAMS:
        outs //= 2
    return outs
