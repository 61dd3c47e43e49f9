"""The linear method ``triton``: torch's, but for one row, where a kernel of its own streams the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from fourfold.layers.torch_linear import DenseWeight, TorchLinearMethod
from fourfold_kernels_triton.compile_ahead import compile_instead
from fourfold_kernels_triton.kernels.products import vector_product
from fourfold_kernels_triton.launch import launch, starts_early

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.entries import ComputeContext

_COLUMNS: Final = 1024
"""Weights of an output that a program reads at a time."""
_PROGRAMS: Final = 264
"""Programs that a product has at least, where its outputs allow: two for each multiprocessor of an H200."""
_LEAST_VOCABULARY: Final = 16384
"""Outputs that may be a vocabulary's: heads are asked for fp32."""
_MOST_OUTS: Final = 8
"""Outputs of a program: 16 KB of weights in flight."""


class TritonLinearMethod(TorchLinearMethod):
    """See the contract for each method."""

    def __init__(self, context: ComputeContext) -> None:
        super().__init__(context)
        self._early = starts_early(context.device)
        self._launch: Callable[..., None] = launch

    def create(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> DenseWeight:
        """Also start compiling its kernel, which is compiled at the first use if that comes earlier."""
        weight = super().create(in_features, out_features, bias=bias, dtype=dtype)
        self._compile(weight)
        return weight

    def _compile(self, weight: DenseWeight) -> None:
        if self._device.type == "cuda" and weight.dense.dtype.itemsize == 2 and weight.in_features % 8 == 0:
            twin = copy.copy(self)
            twin._launch = compile_instead(self._device)
            x = torch.empty(1, weight.in_features, dtype=weight.dense.dtype, device="meta")
            twin.apply(weight, x)
            if weight.out_features >= _LEAST_VOCABULARY:
                twin.apply(weight, x, out_dtype=torch.float32)

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """One row by the kernel, as long as it is dense and of the weight's 16-bit dtype; others by torch.

        For 2 to 16 rows a kernel with matrix instructions was no faster than torch on an H200.
        """
        if (
            x.shape[0] != 1
            or not isinstance(weight, DenseWeight)
            or x.dtype != weight.dense.dtype
            or x.dtype.itemsize != 2
            or x.stride(1) != 1
            or weight.in_features % 8
        ):
            return super().apply(weight, x, out_dtype=out_dtype)
        out_features = weight.out_features
        out = torch.empty((1, out_features), dtype=out_dtype or x.dtype, device=x.device)
        outs = outs_each(out_features)
        self._launch(
            vector_product,
            (-(-out_features // outs),),
            x,
            weight.dense,
            weight.dense if weight.bias is None else weight.bias,
            out,
            IN=weight.in_features,
            OUT=out_features,
            BIAS=weight.bias is not None,
            OUTS=outs,
            COLUMNS=min(_COLUMNS, 1 << (weight.in_features - 1).bit_length()),
            EARLY=self._early,
        )
        return out


def outs_each(out_features: int) -> int:
    """Outputs of one program for one row, a power of two: many, unless that leaves multiprocessors idle."""
    outs = _MOST_OUTS
    while outs > 1 and out_features // outs < _PROGRAMS:
        outs //= 2
    return outs
