"""The operators ``avx512``: norms, activations and vocabulary-wide reductions. A row never depends on other rows."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from fourfold.errors import Unsupported
from fourfold_kernels_cpu.native import load

if TYPE_CHECKING:
    from fourfold.entries import ComputeContext

_NORM: Final = struct.Struct("<10q2d")
_ADD_NORM: Final = struct.Struct("<9q2d")
_GATED: Final = struct.Struct("<6q")
_ROW_FACTOR: Final = struct.Struct("<4qd")
_SCALE: Final = struct.Struct("<6qd")
_ROWS: Final = struct.Struct("<5q")
_GUMBEL: Final = struct.Struct("<8q")
_ACTIVATIONS: Final = {"silu": "silu_mul", "gelu": "gelu_mul", "gelu_tanh": "gelu_tanh_mul"}


class Avx512Operators:
    """See the contract for each method."""

    def __init__(self, context: ComputeContext) -> None:
        if context.dtype is not torch.bfloat16:
            raise Unsupported(f"avx512 operators compute in bfloat16, not {context.dtype}; use --operators torch")
        self._native = load()

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, weight_offset: float = 0.0
    ) -> torch.Tensor:
        """Over the last dim of [..., H]."""
        if not x.is_contiguous() and x.dim() != 2:
            x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width if width else 0
        stride = x.stride(0) if x.dim() == 2 else width
        _check_bf16(x, weight)
        out = self._native.empty(tuple(x.shape), torch.bfloat16)
        slots = _NORM.pack(
            out.data_ptr(),
            width,
            0,
            x.data_ptr(),
            stride,
            0,
            weight.data_ptr(),
            rows,
            1,
            width,
            epsilon,
            weight_offset,
        )
        self._native.call("rms_norm", slots, out, x, weight)
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` is updated in place and returned."""
        _check_bf16(x, residual)
        _check_bf16(residual, weight)
        rows, width = x.shape
        out = self._native.empty((rows, width), torch.bfloat16)
        slots = _ADD_NORM.pack(
            out.data_ptr(),
            width,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            rows,
            width,
            epsilon,
            weight_offset,
        )
        self._native.call("add_rms_norm", slots, out, x, residual, weight)
        return out, residual

    def head_rms_norm(
        self,
        qkv: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        first_head: int,
        num_heads: int,
        head_dim: int,
        weight_offset: float = 0.0,
    ) -> None:
        """In place, head by head."""
        _check_bf16(qkv, weight)
        start, stride = qkv.data_ptr() + first_head * head_dim * 2, qkv.stride(0)
        slots = _NORM.pack(
            start,
            stride,
            head_dim,
            start,
            stride,
            head_dim,
            weight.data_ptr(),
            qkv.shape[0],
            num_heads,
            head_dim,
            epsilon,
            weight_offset,
        )
        self._native.call("rms_norm", slots, qkv, weight)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """One rounding, after the product."""
        kernel = _ACTIVATIONS.get(activation)
        if kernel is None:
            raise Unsupported(f"no activation {activation!r}; there are silu, gelu and gelu_tanh")
        _check_bf16(gate_up, gate_up)
        rows, double = gate_up.shape
        width = double // 2
        out = self._native.empty((rows, width), torch.bfloat16)
        slots = _GATED.pack(out.data_ptr(), width, gate_up.data_ptr(), gate_up.stride(0), rows, width)
        self._native.call(kernel, slots, out, gate_up)
        return out

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """In place; the factor is rounded to bf16 first, as a checkpoint's own scale is."""
        _check_bf16(x, x)
        rounded = _bf16(factor)
        rows, width = x.shape
        slots = _SCALE.pack(x.data_ptr(), x.stride(0), x.data_ptr(), x.stride(0), rows, width, rounded)
        self._native.call("scale", slots, x)
        return x

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """In place."""
        rows, width = _logits_shape(logits)
        slots = _ROW_FACTOR.pack(logits.data_ptr(), logits.stride(0), rows, width, cap)
        self._native.call("softcap", slots, logits)
        return logits

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of equal maxima; entries that are NaN never win."""
        return self._reduce("argmax", logits, torch.int64)

    def log_normalizer(self, logits: torch.Tensor) -> torch.Tensor:
        """One fp32 a row."""
        return self._reduce("logsumexp", logits, torch.float32)

    def _reduce(self, kernel: str, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows, width = _logits_shape(logits)
        out = self._native.empty((rows,), dtype)
        slots = _ROWS.pack(out.data_ptr(), logits.data_ptr(), logits.stride(0), rows, width)
        self._native.call(kernel, slots, out, logits)
        return out

    def gumbel_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """A row of inverse temperature 0 gets no noise: its argmax."""
        rows, width = _logits_shape(logits)
        out = self._native.empty((rows,), torch.int64)
        slots = _GUMBEL.pack(
            out.data_ptr(),
            logits.data_ptr(),
            logits.stride(0),
            rows,
            width,
            inverse_temperature.data_ptr(),
            seeds.data_ptr(),
            positions.data_ptr(),
        )
        self._native.call("gumbel_argmax", slots, out, logits, inverse_temperature, seeds, positions)
        return out


def _check_bf16(x: torch.Tensor, y: torch.Tensor) -> None:
    if x.dtype is not torch.bfloat16 or y.dtype is not torch.bfloat16 or x.stride(-1) != 1 or y.stride(-1) != 1:
        raise Unsupported(f"avx512 operators take bfloat16 rows, not {x.dtype} and {y.dtype} of strides {x.stride()}")


def _logits_shape(logits: torch.Tensor) -> tuple[int, int]:
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise Unsupported(f"logits are fp32 rows, not {logits.dtype} of shape {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def _bf16(value: float) -> float:
    """The nearest bf16, ties to even, without a torch operation."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    nearest: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return nearest
