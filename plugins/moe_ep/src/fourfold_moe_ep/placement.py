"""Which rank holds which expert at the start; pure arithmetic."""

from __future__ import annotations


class Linear:
    """Neighbouring experts on one rank. See ``fourfold.contracts.mixture.ExpertPlacement``."""

    def place(self, num_physical: int, num_ranks: int) -> tuple[int, ...]:
        """9 experts on 2 ranks: 0 0 0 0 0 1 1 1 1."""
        each, left = divmod(num_physical, num_ranks)
        return tuple(rank for rank in range(num_ranks) for _ in range(each + (rank < left)))


class RoundRobin:
    """Neighbouring experts on different ranks, for models whose hot experts are neighbours."""

    def place(self, num_physical: int, num_ranks: int) -> tuple[int, ...]:
        """9 experts on 2 ranks: 0 1 0 1 0 1 0 1 0."""
        return tuple(expert % num_ranks for expert in range(num_physical))
