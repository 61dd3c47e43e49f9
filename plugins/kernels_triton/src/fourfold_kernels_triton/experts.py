"""The experts ``triton``: kernels that stream the weights once for few rows, torch's grouped products for many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn import functional

from fourfold.errors import Unsupported
from fourfold.layers.loop_experts import matrix_of
from fourfold_kernels_triton.kernels.experts import gather_rows, multiply_pairs, order_pairs, sum_pairs
from fourfold_kernels_triton.launch import launch, starts_early

if TYPE_CHECKING:
    from fourfold.contracts.mixture import ExpertPart
    from fourfold.entries import ExpertsContext

_ALIGNED: Final = 8
"""Elements: rows are read 16 bytes at a time."""
_PAIRS: Final = 4096
"""Pairs that a program brings in order at a time."""
_MOST_BYTE_KEYS: Final = 256
_GATHERED: Final = 4
"""Rows that a program brings together at a time."""
_COLUMNS: Final = 1024
"""Columns of a sum that a program makes."""


class ProductTile(NamedTuple):
    """The shape of one program's product."""

    rows: int
    outs: int
    columns: int
    warps: int
    stages: int


TILES: Final = (
    (8.0, ProductTile(rows=16, outs=32, columns=128, warps=4, stages=3)),
    (48.0, ProductTile(rows=64, outs=64, columns=64, warps=4, stages=4)),
    (96.0, ProductTile(rows=128, outs=64, columns=64, warps=4, stages=3)),
)
"""Up to how many pairs an expert has on average, and the tile for them; beyond the last, grouped products."""


class TritonExperts:
    """See the contract for each method. Weights are [experts, 2 I, H], gate rows first, and [experts, H, I]."""

    def __init__(self, context: ExpertsContext) -> None:
        hidden, inner, count = context.hidden_size, context.intermediate_size, context.num_experts
        if hidden % _ALIGNED or inner % _ALIGNED or not inner:
            raise Unsupported(f"triton experts take sizes that are multiples of {_ALIGNED}, not {hidden} and {inner}")
        self._gate_up = context.empty(count, 2 * inner, hidden)
        self._down = context.empty(count, hidden, inner)
        self._slots = torch.arange(count, dtype=torch.int32, device=context.device)
        self._keys = self._slots.to(torch.uint8 if count < _MOST_BYTE_KEYS else torch.int32)
        self._gated = context.operators.gated
        self._activation = context.activation
        self._groups = context.dtype is torch.bfloat16 and context.device.type == "cuda"
        self._precision = "ieee" if context.dtype is torch.float32 else "tf32"  # says nothing to 16-bit products
        self._early = starts_early(context.device)

    def load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Cast and copy."""
        self.matrix(expert, part).copy_(tensor)

    def matrix(self, expert: int, part: ExpertPart) -> torch.Tensor:
        """A view."""
        return matrix_of(self._gate_up, self._down, expert, part)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of a row is taken in fp32, in the order of ``ids``."""
        if not x.shape[0]:
            return torch.zeros_like(x)
        ids, weights = ids.contiguous(), weights.contiguous()
        tile = self._tile(ids.numel())
        if tile is None:
            return self._multiply_many(x, ids, weights)
        return self._multiply_few(x, ids, weights, tile)

    def _tile(self, num_pairs: int) -> ProductTile | None:
        average = num_pairs / len(self._slots)
        for most, tile in TILES:
            if average <= most:
                return tile
        return None if self._groups else TILES[-1][1]

    def _multiply_few(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tile: ProductTile
    ) -> torch.Tensor:
        count, num_pairs, each = len(self._slots), ids.numel(), ids.shape[1]
        hidden, inner = self._down.shape[1], self._down.shape[2]
        numbers = torch.empty(num_pairs + 3 * count + 1, dtype=torch.int32, device=x.device)
        pairs, experts, starts, counts, total = torch.split(numbers, [num_pairs, count, count, count, 1])
        launch(
            order_pairs,
            (count,),
            ids,
            pairs,
            experts,
            starts,
            counts,
            total,
            num_pairs,
            NUM_EXPERTS=count,
            BINS=1 << count.bit_length(),
            BLOCK=min(_PAIRS, max(1 << (num_pairs - 1).bit_length(), 32)),
            EARLY=self._early,
        )
        between = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
        results = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
        for source, matrix, target, gated in ((x, self._gate_up, between, True), (between, self._down, results, False)):
            launch(
                multiply_pairs,
                (-(-target.shape[1] // tile.outs), min(count, num_pairs)),
                source,
                matrix,
                target,
                pairs,
                experts,
                starts,
                counts,
                total,
                source.stride(0),
                EACH=each if gated else 1,
                IN=source.shape[1],
                OUT=target.shape[1],
                GATED=gated,
                ACTIVATION=self._activation,
                ROWS=tile.rows,
                OUTS=tile.outs,
                COLUMNS=tile.columns,
                PRECISION=self._precision,
                EARLY=self._early,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return self._sum(results, None, ids, weights)

    def _multiply_many(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Absent ones sort last, behind the rows of all groups, where the products do not look. Sorting goes through the
        # digits of its keys.
        keys = ids.masked_fill(ids < 0, len(self._slots)).flatten()
        by_expert, order = keys.to(self._keys.dtype).sort(stable=True)
        ends = torch.searchsorted(by_expert, self._keys, right=True, out_int32=True)
        rows = self._gather(x, order, ids.shape[1])
        between = self._gated(functional.grouped_mm(rows, self._gate_up.mT, offs=ends), self._activation)
        results = functional.grouped_mm(between, self._down.mT, offs=ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return self._sum(results, places, ids, weights)

    def _gather(self, x: torch.Tensor, pairs: torch.Tensor, each: int) -> torch.Tensor:
        """The row of each pair."""
        width = x.shape[1]
        out = torch.empty(len(pairs), width, dtype=x.dtype, device=x.device)
        launch(
            gather_rows,
            (-(-len(pairs) // _GATHERED), -(-width // _COLUMNS)),
            x,
            pairs,
            out,
            len(pairs),
            x.stride(0),
            WIDTH=width,
            EACH=each,
            ROWS=_GATHERED,
            BLOCK=min(_COLUMNS, 1 << (width - 1).bit_length()),
            EARLY=self._early,
        )
        return out

    def _sum(
        self, results: torch.Tensor, places: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows, each = ids.shape
        width = results.shape[1]
        out = torch.empty(rows, width, dtype=results.dtype, device=results.device)
        sizes: dict[str, Any] = {"WIDTH": width, "EACH": each, "PLACED": places is not None}
        launch(
            sum_pairs,
            (rows, -(-width // _COLUMNS)),
            results,
            ids if places is None else places,
            ids,
            weights,
            out,
            BLOCK=min(_COLUMNS, 1 << (width - 1).bit_length()),
            EARLY=self._early,
            **sizes,
        )
        return out
