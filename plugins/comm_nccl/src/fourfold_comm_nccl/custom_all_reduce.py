"""Our own sums over memory that ranks map from each other: launching, and whom a launch waited for in vain.

Knows addresses, not how they were come by: a test may give it several ranks of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from fourfold_comm_nccl import all_reduce_kernels, norm_kernels
from fourfold_comm_nccl.failures import Failures
from fourfold_comm_nccl.region import MAX_PROGRAMS, Region

if TYPE_CHECKING:
    from fourfold_comm_nccl.size_table import Plan

VECTOR_BYTES: Final = 16
WARPS: Final = 8
BLOCK_BYTES: Final = 8 << 10
"""What a program moves at a time: two vectors a thread, so that enough is in the air on 128 programs."""
NORM_WARPS: Final = 16
DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
NANOSECONDS: Final = 1_000_000_000


class CustomAllReduce:
    """One rank's side. All ranks must make the same calls in the same order, on one stream at a time."""

    def __init__(
        self, addresses: Sequence[int], region: Region, *, rank: int, device: torch.device, timeout: float
    ) -> None:
        """``addresses`` are those of all ranks' regions as this device sees them, zeroed before any rank is here.

        ``timeout``: seconds after which a launch stops waiting for its peers.
        """
        self.region = region
        self.rank, self.world_size = rank, len(addresses)
        self.failures = Failures(self.world_size, device)
        table = [*addresses, self.failures.address, int(timeout * NANOSECONDS)]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._sequence = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._shared = {"world": self.world_size, "max_programs": MAX_PROGRAMS}
        self._one_shot = {**self._shared, "slots_at": region.slots_at, "slot_bytes": region.slot_bytes}
        self._two_shot = {**self._one_shot, "part_bytes": region.part_bytes, "results_at": region.results_at}

    @property
    def failed(self) -> bool:
        """Whether a launch has waited in vain; what it gave is not to be used, and later ones do not wait at all."""
        return self.failures.failed

    @property
    def missing(self) -> list[int]:
        """The ranks that a launch waited for in vain."""
        return self.failures.missing

    def takes(self, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether a tensor of this size may be summed. The same on all ranks."""
        return dtype in DTYPES and 0 < nbytes <= self.region.max_bytes and nbytes % VECTOR_BYTES == 0

    def all_reduce(self, plan: Plan, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` = the sum of all ranks' ``tensor``, which may be the same; contiguous, aligned to 16 bytes."""
        vectors = tensor.nbytes // VECTOR_BYTES
        place = (self._table, self._sequence, tensor, out, self.rank, vectors)
        block = BLOCK_BYTES // tensor.itemsize
        blocks = -(-tensor.numel() // block)
        if plan.algorithm == "one_shot":
            kernel, constants, grid = all_reduce_kernels.one_shot_all_reduce, self._one_shot, blocks
        else:
            kernel, constants, grid = (
                all_reduce_kernels.two_shot_all_reduce,
                self._two_shot,
                -(-blocks // self.world_size),
            )
        self._launch(kernel, min(plan.programs, grid), place, constants, block=block)

    def all_reduce_add_rms_norm(
        self,
        plan: Plan | None,
        tensor: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        out: torch.Tensor,
        epsilon: float,
    ) -> None:
        """``residual`` += the sum of all ranks' ``tensor`` [..., width]; ``out`` = its RMS norm times ``weight``.

        ``out`` may be ``tensor``. All contiguous, of one dtype and aligned to 16 bytes, as rows are. ``plan`` None:
        ``tensor`` is summed already.
        """
        width = weight.shape[0]
        rows = tensor.numel() // width
        if plan is None:
            constants = {"width": width, "block": triton.next_power_of_2(width)}
            self._launch(norm_kernels.add_norm, rows, (tensor, residual, weight, out, epsilon), constants)
            return
        tensors = (self._table, self._sequence, tensor, residual, weight, out)
        place = (*tensors, self.rank, rows, epsilon)
        kernel, constants, block = norm_kernels.one_shot_add_norm, self._one_shot, triton.next_power_of_2(width)
        self._launch(kernel, min(plan.programs, rows), place, constants, width=width, block=block, num_warps=NORM_WARPS)

    def meet(self) -> None:
        """On the device: go on when all ranks are here."""
        place = (self._table, self._sequence, self.rank)
        self._launch(all_reduce_kernels.meet_all, 1, place, self._shared)

    def wait_at_most(self, seconds: float) -> None:
        """What launches from now on wait for their peers, recorded ones too."""
        self._table[-1] = int(seconds * NANOSECONDS)

    def count_from(self, number: int) -> None:
        """Number operations from ``number`` (32 bits, signed) on; the same on all ranks, while nothing runs."""
        self._sequence.fill_(number)

    def _launch(
        self, kernel: Any, programs: int, place: tuple[Any, ...], constants: dict[str, int], **options: int
    ) -> None:
        options.setdefault("num_warps", WARPS)
        # A product and a sum may become one operation; Triton's default differs between versions, and with it the bits.
        kernel[(programs,)](*place, **constants, **options, enable_fp_fusion=True)
