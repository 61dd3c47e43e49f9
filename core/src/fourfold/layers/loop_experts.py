"""Experts one after another in plain torch: the twin that faster ones are compared with, and the faster one in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fourfold.errors import Unsupported

if TYPE_CHECKING:
    from fourfold.contracts.mixture import ExpertPart
    from fourfold.entries import ExpertsContext


class LoopExperts:
    """See the contract for each method. Weights are [experts, 2 I, H], gate rows first, and [experts, H, I]."""

    def __init__(self, context: ExpertsContext) -> None:
        hidden, inner, count = context.hidden_size, context.intermediate_size, context.num_experts
        self._gate_up = context.empty(count, 2 * inner, hidden)
        self._down = context.empty(count, hidden, inner)
        self._gated = context.operators.gated
        self._activation = context.activation

    def load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Cast and copy."""
        self.matrix(expert, part).copy_(tensor)

    def matrix(self, expert: int, part: ExpertPart) -> torch.Tensor:
        """A view."""
        return matrix_of(self._gate_up, self._down, expert, part)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of a row is taken in fp32, in the order of its experts' slots."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported("experts one after another cannot be recorded: which ones run is known on the host only")
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(ids.flatten().tolist())):
            if expert < 0:
                continue
            rows, places = torch.nonzero(ids == expert, as_tuple=True)
            inner = self._gated(functional.linear(x[rows], self._gate_up[expert]), self._activation)
            result = functional.linear(inner, self._down[expert])
            out.index_add_(0, rows, result.float() * weights[rows, places, None])
        return out.to(x.dtype)


def matrix_of(gate_up: torch.Tensor, down: torch.Tensor, expert: int, part: ExpertPart) -> torch.Tensor:
    """One matrix of ``gate_up`` [experts, 2 I, H] and ``down`` [experts, H, I]."""
    inner = down.shape[2]
    if part == "down":
        return down[expert]
    return gate_up[expert, :inner] if part == "gate" else gate_up[expert, inner:]
