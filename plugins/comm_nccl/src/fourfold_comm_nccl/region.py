"""Where things lie in the memory that each rank offers its peers. Arithmetic alone: knows no torch and no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WORLD_SIZES: Final = (2, 4, 8)
"""Powers of two, which the kernels' vectors of peers need; one host has no more."""
MAX_PROGRAMS: Final = 128
"""Of one launch: all spin at once, so all must fit on the device beside other work (an H200 has 132 processors)."""
ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One rank's memory: signals, then two slots of data.

    Operation n uses slot n modulo 2, and nobody is two operations ahead, so nothing is overwritten that is still read.
    """

    world_size: int
    max_bytes: int = 16 << 20
    """Largest tensor."""

    @property
    def slots_at(self) -> int:
        """Behind the signals, which are 32-bit: [2 phases][programs][source rank]."""
        return _aligned(2 * MAX_PROGRAMS * self.world_size * 4)

    @property
    def part_bytes(self) -> int:
        """Of the stripe that one source sends for this rank to sum; a last superblock may be partly empty."""
        return _aligned(self.max_bytes // self.world_size + MAX_STRIPE_BYTES)

    @property
    def results_at(self) -> int:
        """Within a slot, behind the parts of all sources: sums, in the tensor's own order."""
        return self.world_size * self.part_bytes

    @property
    def slot_bytes(self) -> int:
        """Parts and results of a two-shot sum, or a whole tensor for a one-shot sum."""
        return self.results_at + _aligned(self.max_bytes)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.slots_at + 2 * self.slot_bytes


MAX_STRIPE_BYTES: Final = 16 << 10
"""Largest block that one program moves at a time."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
