"""The sum over ranks, the residual and the norm after it as one step, where the communicator has that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fourfold.errors import Unsupported

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.distributed.group_coordinator import GroupCoordinator

AddNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(x, residual), both [T, H] -> (the norm of their sum, that sum)."""
SummingNorm = Callable[[torch.Tensor], AddNorm]
"""A norm's weight [H] -> an AddNorm of which ``x`` is this rank's summand."""


def find_summing_norm(
    group: GroupCoordinator, *, hidden_size: int, epsilon: float, dtype: torch.dtype, device: torch.device
) -> SummingNorm | None:
    """None where some rank's communicator cannot; all ranks must call this, and get alike answers."""
    communicator = group.communicator
    if communicator is None:
        return None
    able = _is_able(communicator, torch.ones(2, hidden_size, dtype=dtype, device=device), epsilon)
    if not group.all_agree(able):
        return None

    def bind(weight: torch.Tensor) -> AddNorm:
        return lambda x, residual: communicator.all_reduce_add_rms_norm(x, residual, weight, epsilon)

    return bind


def _is_able(communicator: Communicator, rows: torch.Tensor, epsilon: float) -> bool:
    try:
        communicator.all_reduce_add_rms_norm(rows, rows.clone(), rows[0].clone(), epsilon)
    except Unsupported:
        return False
    return True
