"""The operators ``triton``: norms, activations, and sampling without a wait for the device. See the contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from fourfold.errors import Unsupported
from fourfold.layers.router import LEAST_SUM
from fourfold_kernels_triton.compile_ahead import compile_instead
from fourfold_kernels_triton.counters import Counters
from fourfold_kernels_triton.kernels.activations import gated_rows, soft_cap_rows
from fourfold_kernels_triton.kernels.norms import add_rms_norm_rows, head_rms_norm_rows, rms_norm_rows
from fourfold_kernels_triton.kernels.routing import choose_rows
from fourfold_kernels_triton.kernels.sampling import argmax_rows, gumbel_argmax_rows, log_normalizer_rows
from fourfold_kernels_triton.launch import launch, starts_early

if TYPE_CHECKING:
    from fourfold.entries import ComputeContext
    from fourfold.models.description import MixtureDescription

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
_COLUMNS: Final = 1024
"""Entries of an elementwise program."""
_VOCABULARY_COLUMNS: Final = 2048
"""Entries of the vocabulary that one program reduces; a row of 151,936 keeps 75 of 132 multiprocessors busy."""
_FEWEST_BLOCKS: Final = 128
"""So that one kernel does for all vocabularies of up to 262,144."""
_HEAD_ENTRIES: Final = 2048
"""Entries of a program that normalises heads."""

_WARP_LANES: Final = 256
"""Experts that one warp chooses from: reductions within a warp need no barrier."""


class TritonOperators:
    """Norms, activations and vocabulary-wide reductions."""

    def __init__(self, context: ComputeContext) -> None:
        self.dtype = context.dtype
        self._device = context.device
        self._early = starts_early(context.device)
        self._launch: Callable[..., None] = launch
        self._counters = Counters(context.device)
        self._factors: dict[tuple[float, torch.dtype], float] = {}
        self._compile(_sample)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, weight_offset: float = 0.0
    ) -> torch.Tensor:
        """See the contract."""
        width = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(
            rms_norm_rows,
            (rows.shape[0],),
            rows,
            weight,
            out,
            rows.stride(0),
            epsilon,
            weight_offset,
            WIDTH=width,
            BLOCK=_power_of_two(width),
            EARLY=self._early,
            num_warps=_warps(width),
        )
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
        """See the contract; both results take the places of the inputs."""
        width = x.shape[1]
        self._launch(
            add_rms_norm_rows,
            (x.shape[0],),
            x,
            residual,
            weight,
            x.stride(0),
            residual.stride(0),
            epsilon,
            weight_offset,
            WIDTH=width,
            BLOCK=_power_of_two(width),
            EARLY=self._early,
            num_warps=_warps(width),
        )
        return x, residual

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
        """See the contract."""
        block = _power_of_two(head_dim)
        heads = max(1, min(_power_of_two(num_heads), _HEAD_ENTRIES // block))
        self._launch(
            head_rms_norm_rows,
            (qkv.shape[0], -(-num_heads // heads)),
            qkv,
            weight,
            qkv.stride(0),
            epsilon,
            weight_offset,
            FIRST_HEAD=first_head,
            NUM_HEADS=num_heads,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
        )

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See the contract."""
        if activation not in ACTIVATIONS:
            raise Unsupported(f"no activation {activation!r}; there are silu, gelu and gelu_tanh")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        self._launch(
            gated_rows,
            (rows, -(-width // _COLUMNS)),
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            ACTIVATION=activation,
            BLOCK=_COLUMNS,
            EARLY=self._early,
        )
        return out

    def choose_experts(
        self, logits: torch.Tensor, bias: torch.Tensor | None, mixture: MixtureDescription
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ExpertChoosing."""
        rows, top_k = logits.shape[0], mixture.top_k
        ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
        size = mixture.num_experts // mixture.num_groups
        groups, sizes = _power_of_two(mixture.num_groups), _power_of_two(size)
        sigmoid = mixture.scoring == "sigmoid"
        self._launch(
            choose_rows,
            (rows,),
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            logits.stride(0),
            float(mixture.scale),
            LEAST_SUM if sigmoid else 0.0,
            SIGMOID=sigmoid,
            BIASED=bias is not None,
            NORMALIZE=mixture.normalize,
            TOP_K=top_k,
            NUM_GROUPS=mixture.num_groups,
            GROUP_SIZE=size,
            TOP_GROUPS=mixture.top_groups,
            BEST_TWO=mixture.group_score == "top2_sum",
            GROUPS=groups,
            SIZES=sizes,
            PLACES=_power_of_two(top_k),
            EARLY=self._early,
            num_warps=1 if groups * sizes <= _WARP_LANES else 4,
        )
        return ids, weights

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """See the contract."""
        # The factor is rounded to the dtype first, as a checkpoint's own scale is; on the host, once.
        key = (factor, x.dtype)
        if key not in self._factors:
            self._factors[key] = torch.tensor(factor, dtype=x.dtype).item()
        return x * self._factors[key]

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """See the contract; in place."""
        rows, width = logits.shape
        grid = (rows, -(-width // _COLUMNS))
        self._launch(soft_cap_rows, grid, logits, logits.stride(0), width, cap, BLOCK=_COLUMNS)
        return logits

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        self._reduce(argmax_rows, logits, (), torch.int32, (out,))
        return out

    def gumbel_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See the contract."""
        return self.draw(logits, inverse_temperature, seeds, positions)[0]

    def draw(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See CheckedDraws."""
        ids, codes = torch.empty(2, logits.shape[0], dtype=torch.int64, device=logits.device)
        inputs = (inverse_temperature, seeds, positions)
        self._reduce(gumbel_argmax_rows, logits, inputs, torch.int32, (ids, codes), enable_fp_fusion=False)
        return ids, codes

    def log_normalizer(self, logits: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        self._reduce(log_normalizer_rows, logits, (), torch.float32, (out,))
        return out

    def expect(self, *, hidden_size: int, intermediate_size: int, activation: str) -> None:
        """See Foresight."""

        def rows(operators: TritonOperators) -> None:
            x = torch.empty(2, hidden_size, dtype=self.dtype, device="meta")
            operators.rms_norm(x, x[0], 1e-6)
            operators.add_rms_norm(x, x, x[0], 1e-6)
            operators.gated(torch.empty(2, 2 * intermediate_size, dtype=self.dtype, device="meta"), activation)

        self._compile(rows)

    def _compile(self, use: Callable[[TritonOperators], None]) -> None:
        """Start compiling what ``use`` would start."""
        if self._device.type == "cuda":
            twin = copy.copy(self)
            twin._launch = compile_instead(self._device)
            use(twin)

    def _reduce(
        self,
        kernel: Any,
        logits: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        second: torch.dtype,
        outs: tuple[torch.Tensor, ...],
        **options: Any,
    ) -> None:
        """Run a kernel whose blocks leave a float and a ``second`` each, of which their row's last makes ``outs``."""
        rows, width = logits.shape
        blocks = -(-width // _VOCABULARY_COLUMNS)
        found = torch.empty(rows * blocks, dtype=torch.float32, device=logits.device)
        beside = torch.empty(rows * blocks, dtype=second, device=logits.device)
        self._launch(
            kernel,
            (blocks, rows),
            logits,
            *inputs,
            found,
            beside,
            self._counters.at_least(rows),
            *outs,
            logits.stride(0),
            width,
            BLOCK=_VOCABULARY_COLUMNS,
            BLOCKS=max(_power_of_two(blocks), _FEWEST_BLOCKS),
            EARLY=self._early,
            **options,
        )


def _sample(operators: TritonOperators) -> None:
    """Of a few rows; other numbers of them have the same kernels."""
    numbers = torch.empty(2, dtype=torch.int64, device="meta")
    logits = torch.empty(2, 16 * _VOCABULARY_COLUMNS, device="meta")
    operators.draw(logits, torch.empty(2, device="meta"), numbers, numbers)
    operators.argmax(logits)


def _power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


def _warps(width: int) -> int:
    """For a row in one program: 8 to 16 entries a thread."""
    return min(max(_power_of_two(width) // 512, 1), 16)
