"""Rows to the ranks of their experts and back, over memory that ranks map from each other: launching the kernels.

Knows addresses, not how they were come by: a test may give it several ranks of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from fourfold_comm_nccl import rows_kernels
from fourfold_comm_nccl.custom_all_reduce import NANOSECONDS
from fourfold_comm_nccl.region import MAX_PROGRAMS

if TYPE_CHECKING:
    from fourfold_comm_nccl.failures import Failures
    from fourfold_comm_nccl.rows_region import RowsRegion

WARPS: Final = 16
MOST_ROWS: Final = 4
"""That a program moves at a time: with more of them the registers do not hold what is in the air."""
BLOCK_BYTES: Final = 4 << 10
"""Of a row, that a program moves at a time."""


class RowExchange:
    """One rank's side. All ranks must make the same calls in the same order, on one stream at a time."""

    def __init__(
        self,
        addresses: Sequence[int],
        region: RowsRegion,
        owners: torch.Tensor,
        failures: Failures,
        *,
        rank: int,
        timeout: float,
    ) -> None:
        """``addresses`` are those of all ranks' regions as this device sees them, zeroed before any rank is here.

        ``owners`` int32 [P] says on the device which rank has each physical expert; ``timeout``: seconds after which a
        launch stops waiting for its peers.
        """
        device = owners.device
        self._rank = rank
        self._owners = owners
        table = [*addresses, failures.address, int(timeout * NANOSECONDS)]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._sequence = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._receivers = torch.zeros(region.max_tokens, dtype=torch.int32, device=device)
        self._shared = {
            "region": region,
            "choices": triton.next_power_of_2(region.top_k),
            "max_programs": MAX_PROGRAMS,
        }

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        sizes: Sequence[int],
        *,
        moves: bool = True,
    ) -> None:
        """Send ``x`` [T, H], ``ids`` int32 [T, K] and ``weights`` fp32 [T, K]; ends when all ranks' rows have come.

        All contiguous, rows of whole vectors; ``sizes`` are the rows of every rank, not 0 all of them. Without
        ``moves`` what was queued before has copied ``x``.
        """
        tensors = (self._table, self._sequence, x, ids, weights, self._owners, self._receivers)
        self._launch(rows_kernels.dispatch_rows, tensors, sizes, x, moves=moves)

    def combine(self, partial: torch.Tensor, out: torch.Tensor, sizes: Sequence[int], *, moves: bool = True) -> None:
        """``out`` [T, H] = what all ranks have made of this rank's rows; ``partial`` [R, H] is this one's part.

        The same ``sizes`` and ``moves``. The sum is taken in fp32, in the order of ranks.
        """
        tensors = (self._table, self._sequence, partial, self._receivers, out)
        self._launch(rows_kernels.combine_rows, tensors, sizes, out, moves=moves)

    def count_from(self, number: int) -> None:
        """Number operations from ``number`` (32 bits, signed) on; the same on all ranks, while nothing runs."""
        self._sequence.fill_(number)

    def _launch(
        self, kernel: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int], like: torch.Tensor, *, moves: bool
    ) -> None:
        most, hidden = max(sizes), like.shape[1]
        # The ranks' programs meet each other, so that their number follows from what all ranks know.
        rows = min(triton.next_power_of_2(-(-most // MAX_PROGRAMS)), MOST_ROWS)
        items = -(-most // rows)
        numbers = (self._rank, sum(sizes[: self._rank]), sizes[self._rank], items)
        kernel[(min(items, MAX_PROGRAMS),)](
            *tensors,
            *numbers,
            **self._shared,
            moves=moves,
            hidden=hidden,
            rows=rows,
            block=min(triton.next_power_of_2(hidden), BLOCK_BYTES // like.itemsize),
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
