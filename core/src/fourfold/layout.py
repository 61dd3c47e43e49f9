"""The one place for rank arithmetic; knows no torch and no process.

A rank is ``((e * DP + d) * PP + p) * TP + t``: tensor parallel fastest, so that the ranks of one layer are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """Where one rank stands on the four axes, each counted from 0."""

    external_dp: int
    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of the four axes and everything that follows from them."""

    external_dp: int = 1
    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("external_dp", "dp", "pp", "tp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"{self} has {axis}={getattr(self, axis)}; every axis is at least 1")

    def __str__(self) -> str:
        return f"{self.external_dp} external dp x {self.dp} dp x {self.pp} pp x {self.tp} tp"

    @property
    def world_size(self) -> int:
        """Ranks in all: the product of the four axes."""
        return self.external_dp * self.dp * self.pp * self.tp

    @property
    def engine_world_size(self) -> int:
        """Ranks that one engine drives: TP x PP."""
        return self.pp * self.tp

    @property
    def output_rank(self) -> int:
        """The rank within an engine that samples and replies: the first TP rank of the last stage."""
        return (self.pp - 1) * self.tp

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at a coordinate."""
        c = coordinate
        return ((c.external_dp * self.dp + c.dp) * self.pp + c.pp) * self.tp + c.tp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a global rank; the inverse of ``rank``."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside 0 to {self.world_size - 1} of {self}")
        rest, tp = divmod(rank, self.tp)
        rest, pp = divmod(rest, self.pp)
        external_dp, dp = divmod(rest, self.dp)
        return Coordinate(external_dp=external_dp, dp=dp, pp=pp, tp=tp)

    def label(self, rank: int) -> str:
        """The name of a rank in logs and process titles, such as ``DP0.PP1.TP3``."""
        c = self.coordinate(rank)
        return f"DP{c.external_dp * self.dp + c.dp}.PP{c.pp}.TP{c.tp}"

    def tp_groups(self) -> list[list[int]]:
        """Ranks that share the layers of one stage."""
        return self._groups(lambda c: (c.external_dp, c.dp, c.pp))

    def pp_groups(self) -> list[list[int]]:
        """Ranks that follow each other in depth, first stage first."""
        return self._groups(lambda c: (c.external_dp, c.dp, c.tp))

    def dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard in each lockstep replica."""
        return self._groups(lambda c: (c.external_dp, c.pp, c.tp))

    def ep_groups(self) -> list[list[int]]:
        """Ranks that spread one stage's experts: all of DP x TP."""
        return self._groups(lambda c: (c.external_dp, c.pp))

    def _groups(self, key: Callable[[Coordinate], tuple[int, ...]]) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(self.coordinate(rank)), []).append(rank)
        return list(groups.values())
