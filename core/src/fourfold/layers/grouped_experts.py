"""All experts in two grouped products of torch, in bf16: rows are sorted by expert, and no step waits for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fourfold.errors import Unsupported
from fourfold.layers.loop_experts import matrix_of

if TYPE_CHECKING:
    from fourfold.contracts.mixture import ExpertPart
    from fourfold.entries import ExpertsContext

_ALIGNED_ELEMENTS = 8
"""torch's grouped product takes rows whose strides are multiples of 16 bytes."""


class GroupedExperts:
    """See the contract for each method. Weights are [experts, 2 I, H], gate rows first, and [experts, H, I]."""

    def __init__(self, context: ExpertsContext) -> None:
        hidden, inner, count = context.hidden_size, context.intermediate_size, context.num_experts
        if context.dtype != torch.bfloat16:
            raise Unsupported(f"grouped experts compute in bfloat16, not {context.dtype}")
        if hidden % _ALIGNED_ELEMENTS or inner % _ALIGNED_ELEMENTS or not inner:
            raise Unsupported(
                f"grouped experts take sizes that are multiples of {_ALIGNED_ELEMENTS}, not {hidden} and {inner}"
            )
        self._gate_up = context.empty(count, 2 * inner, hidden)
        self._down = context.empty(count, hidden, inner)
        self._slots = torch.arange(count, dtype=torch.int32, device=context.device)
        self._gated = context.operators.gated
        self._activation = context.activation

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
        absent = ids < 0
        # Absent ones sort last, behind the rows of all groups, where the products do not look.
        by_expert, order = ids.masked_fill(absent, len(self._slots)).flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, self._slots, right=True, out_int32=True)
        rows = x[order // ids.shape[1]]
        inner = self._gated(functional.grouped_mm(rows, self._gate_up.mT, offs=ends), self._activation)
        result = functional.grouped_mm(inner, self._down.mT, offs=ends)
        placed = torch.empty_like(result)
        placed[order] = result
        terms = placed.view(*ids.shape, -1).float() * weights.unsqueeze(-1)
        return terms.masked_fill_(absent.unsqueeze(-1), 0).sum(dim=1).to(x.dtype)
