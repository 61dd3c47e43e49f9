"""The linear method ``packed_bf16``: one packed copy of a weight serves GEMV, GEMM and embedding look-up.

Layout [ceil(out / 32)][ceil(in / 2)][32][2] bf16, zero-padded. An output is one fp32 chain over the inputs, so a row's
result is bitwise the same for every batch it travels in and every number of threads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from fourfold.errors import EngineError, Unsupported
from fourfold.shared_memory import shared_region
from fourfold_kernels_cpu.huge_pages import WeightArena
from fourfold_kernels_cpu.native import load

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.entries import ComputeContext

PANEL: Final = 32
_LINEAR: Final = struct.Struct("<10q")
_PACK: Final = struct.Struct("<7q")
_EMBEDDING: Final = struct.Struct("<8qd")
_SOURCES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A packed [out_features, in_features] weight and its fp32 bias."""

    out_features: int
    in_features: int
    packed: torch.Tensor
    bias: torch.Tensor | None
    packed_address: int
    bias_address: int

    def dense(self) -> torch.Tensor:
        """The weight as a plain [out, in] bf16 tensor, for tests and exports."""
        pairs = -(-self.in_features // 2)
        panels = self.packed.view(-1, pairs, PANEL, 2).permute(0, 2, 1, 3).reshape(-1, pairs * 2)
        return panels[: self.out_features, : self.in_features].contiguous()


class PackedLinearMethod:
    """Creates, fills and applies packed weights. See the contract for each method."""

    def __init__(self, context: ComputeContext) -> None:
        if context.dtype is not torch.bfloat16:
            raise Unsupported(f"packed_bf16 computes in bfloat16, not {context.dtype}; use --linear-method torch")
        self._native = load()
        self._arena = WeightArena(shared_region(context.rank))

    def create(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> PackedWeight:
        """Allocate storage: zeroed, or with what another replica has packed."""
        if dtype is not torch.bfloat16:
            raise Unsupported(f"packed_bf16 stores bfloat16, not {dtype}; use --linear-method torch")
        packed = self._arena.zeros(-(-out_features // PANEL) * PANEL * -(-in_features // 2) * 2)
        vector = torch.zeros(out_features, dtype=torch.float32) if bias else None
        return PackedWeight(
            out_features, in_features, packed, vector, packed.data_ptr(), 0 if vector is None else vector.data_ptr()
        )

    def load_shard(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Pack rows of bf16, fp16 or fp32; other dtypes pass through fp32."""
        target = _packed(weight)
        rows, columns = tensor.shape
        if columns != weight.in_features or not 0 <= first_row <= weight.out_features - rows:
            raise Unsupported(
                f"rows {first_row} to {first_row + rows} of {columns} do not fit a packed weight of "
                f"[{weight.out_features}, {weight.in_features}]"
            )
        if rows == 0:
            return
        if tensor.dtype not in _SOURCES:
            tensor = tensor.float()
        if tensor.stride(1) != 1:
            tensor = tensor.contiguous()
        if self._arena.shared is None:
            self._pack(target.packed, tensor, first_row)
            return
        first_panel, last_panel = first_row // PANEL, -(-(first_row + rows) // PANEL)
        panel = -(-columns // 2) * 2 * PANEL
        there = target.packed[first_panel * panel : last_panel * panel].view(torch.int16)
        with self._arena.shared.locked():
            if there.any():
                mine = there.clone()
                self._pack(mine, tensor, first_row - first_panel * PANEL)
                if torch.equal(mine, there):
                    return
                start = first_row - first_panel * PANEL
                if _rows(there, columns)[start : start + rows].any():
                    raise EngineError("the weights differ from those of a replica that is running; restart them all")
            self._pack(target.packed, tensor, first_row)

    def _pack(self, target: torch.Tensor, tensor: torch.Tensor, first_row: int) -> None:
        rows, columns = tensor.shape
        slots = _PACK.pack(
            target.data_ptr(),
            first_row,
            tensor.data_ptr(),
            tensor.stride(0) * tensor.element_size(),
            rows,
            columns,
            _SOURCES[tensor.dtype],
        )
        self._native.call("pack", slots, tensor, target)

    def load_bias(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Keep bias entries in fp32, rounded to bf16 first as a dense layer would."""
        bias = _packed(weight).bias
        if bias is None:
            raise Unsupported("this packed weight was created without a bias")
        bias[first_row : first_row + tensor.shape[0]].copy_(tensor.to(torch.bfloat16))

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """One GEMM; results in bf16 or fp32."""
        weight = _packed(weight)
        if x.dtype is not torch.bfloat16 or x.stride(-1) != 1 or x.dim() != 2:
            raise Unsupported(f"packed_bf16 takes bfloat16 rows, not {x.dtype} of shape {tuple(x.shape)}")
        full = out_dtype is torch.float32
        if not full and out_dtype is not None and out_dtype is not torch.bfloat16:
            raise Unsupported(f"packed_bf16 returns bfloat16 or float32, not {out_dtype}")
        tokens, columns = x.shape
        if columns != weight.in_features:
            raise Unsupported(f"rows of {columns} do not fit a weight of {weight.in_features} inputs")
        out_features = weight.out_features
        out = self._native.empty((tokens, out_features), torch.float32 if full else torch.bfloat16)
        slots = _LINEAR.pack(
            x.data_ptr(),
            x.stride(0),
            weight.packed_address,
            weight.bias_address,
            out.data_ptr(),
            out_features,
            tokens,
            out_features,
            columns,
            full,
        )
        self._native.call("linear", slots, x, weight.packed, weight.bias, out)
        return out

    def embed(self, weight: LinearWeight, token_ids: torch.Tensor, *, first_id: int | None = None) -> torch.Tensor:
        """Rows of the packed weight; ids outside it give zero rows."""
        return self.embed_range(weight, token_ids, first_id=first_id or 0, factor=1.0)

    def embed_range(
        self, weight: LinearWeight, token_ids: torch.Tensor, *, first_id: int, factor: float
    ) -> torch.Tensor:
        """Rows for ids of [first_id, first_id + out_features), others zero, times ``factor``."""
        weight = _packed(weight)
        if token_ids.dtype is not torch.int64 or not token_ids.is_contiguous():
            raise Unsupported(f"token ids are contiguous int64, not {token_ids.dtype}")
        tokens = token_ids.numel()
        out = self._native.empty((tokens, weight.in_features), torch.bfloat16)
        slots = _EMBEDDING.pack(
            out.data_ptr(),
            weight.in_features,
            token_ids.data_ptr(),
            tokens,
            weight.packed_address,
            weight.out_features,
            weight.in_features,
            first_id,
            factor,
        )
        self._native.call("embedding", slots, out, token_ids, weight.packed)
        return out

    def release_weights(self, *, keep: bool) -> None:
        """Lose them: the host's memory is where they would be kept. Biases are small, and stay."""
        if not keep:
            self._arena.clear()

    def restore_weights(self) -> None:
        """Have the pages that ``release_weights`` gave back."""
        self._arena.prepare()

    def discard_weights(self) -> None:
        """Zero what other replicas would compare with."""
        self._arena.clear()
        self._arena.prepare()


def _rows(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Panels of a packed weight, as int16, a row an output: [outputs of the panels, inputs rounded up to pairs]."""
    pairs = -(-columns // 2)
    return packed.view(-1, pairs, PANEL, 2).permute(0, 2, 1, 3).reshape(-1, pairs * 2)


def _packed(weight: LinearWeight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"packed_bf16 got a weight of {type(weight).__name__}, which it did not create")
    return weight
