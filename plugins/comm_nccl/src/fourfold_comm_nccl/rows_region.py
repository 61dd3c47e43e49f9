"""Where things lie in the memory through which ranks send each other rows. Arithmetic alone: knows no torch.

R is the most rows of all ranks together, T the most of one rank, W ranks, K experts a row, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold_comm_nccl.region import ALIGNMENT, MAX_PROGRAMS


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsRegion:
    """One rank's memory. Each row of each rank has a place of its own, so that nothing is counted and announced.

    One set of places is enough. A rank sends the rows of the next layer when it has what came back of this one, which
    its peers send when they have used their rows; it sends back when it has the rows of a layer, which its peers send
    when they have summed what came back of the one before.
    """

    world_size: int
    max_tokens: int
    """T."""
    top_k: int
    row_bytes: int
    """Of H columns."""

    @property
    def senders_at(self) -> int:
        """int32 [W, 2], behind the signals, int32 [programs][source rank]: each rank's first row, and how many."""
        return _aligned(MAX_PROGRAMS * self.world_size * 4)

    @property
    def ids_at(self) -> int:
        """int32 [R, K]: physical experts of this rank, or -1."""
        return self.senders_at + _aligned(2 * self.world_size * 4)

    @property
    def weights_at(self) -> int:
        """fp32 [R, K]."""
        return self.ids_at + _aligned(self.num_rows * self.top_k * 4)

    @property
    def rows_at(self) -> int:
        """[R, H]: rows that came."""
        return self.weights_at + _aligned(self.num_rows * self.top_k * 4)

    @property
    def returned_at(self) -> int:
        """[W, T, H]: what each rank has made of this rank's rows."""
        return self.rows_at + _aligned(self.num_rows * self.row_bytes)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.returned_at + _aligned(self.num_rows * self.row_bytes)

    @property
    def num_rows(self) -> int:
        """R."""
        return self.world_size * self.max_tokens


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
