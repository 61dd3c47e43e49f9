"""The linear method in plain torch: a dense [out, in] weight. The twin that every faster method is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fourfold.layers.weight_memory import WeightMemory

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.entries import ComputeContext

_WIDENED_ELEMENTS = 1 << 22
"""Weight elements that are widened at a time when the result is asked for in more precision: 16 MB in fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """[out, in] and an optional bias [out]."""

    dense: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.dense.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.dense.shape[1]


class TorchLinearMethod:
    """See the contract for each method."""

    def __init__(self, context: ComputeContext) -> None:
        self._device = context.device
        self._memory = WeightMemory(context.device)

    def create(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> DenseWeight:
        """Allocate, without filling."""
        dense = self._memory.empty(out_features, in_features, dtype=dtype)
        return DenseWeight(dense, torch.empty(out_features, dtype=dtype, device=self._device) if bias else None)

    def load_shard(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Cast and copy."""
        _dense(weight).dense[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def load_bias(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Cast and copy."""
        bias = _dense(weight).bias
        if bias is None:
            raise ValueError("this weight was created without a bias")
        bias[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """One product; in the weight's own precision, or in ``out_dtype`` where that is wider."""
        dense = _dense(weight)
        if out_dtype is None or out_dtype == dense.dense.dtype:
            return functional.linear(x, dense.dense, dense.bias)
        # A product of bf16 values rounds its sums to bf16: too coarse for logits, whose order decides the token.
        if x.is_cuda and dense.bias is None and x.dtype == dense.dense.dtype:
            return torch.mm(x, dense.dense.t(), out_dtype=out_dtype)  # the sums are fp32 there anyway
        out = torch.empty(*x.shape[:-1], dense.out_features, dtype=out_dtype, device=x.device)
        wide = x.to(out_dtype)
        step = max(1, _WIDENED_ELEMENTS // dense.in_features)
        for first in range(0, dense.out_features, step):
            rows = slice(first, first + step)
            bias = None if dense.bias is None else dense.bias[rows].to(out_dtype)
            out[..., rows] = functional.linear(wide, dense.dense[rows].to(out_dtype), bias)
        return out

    def embed(self, weight: LinearWeight, token_ids: torch.Tensor, *, first_id: int | None = None) -> torch.Tensor:
        """Gather rows."""
        dense = _dense(weight).dense
        if first_id is None:
            return functional.embedding(token_ids, dense)
        local = token_ids - first_id
        elsewhere = (local < 0) | (local >= dense.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), dense)
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)

    def release_weights(self, *, keep: bool) -> None:
        """See ``WeightMemory``; biases are small, and stay."""
        self._memory.release_weights(keep=keep)

    def restore_weights(self) -> None:
        """See ``WeightMemory``."""
        self._memory.restore_weights()

    def discard_weights(self) -> None:
        """See ``WeightMemory``."""
        self._memory.discard_weights()


def _dense(weight: LinearWeight) -> DenseWeight:
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"the torch linear method got a weight of {type(weight).__name__}, which it did not create")
    return weight
