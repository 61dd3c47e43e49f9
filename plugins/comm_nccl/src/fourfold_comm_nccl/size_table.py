"""Which way a sum of so many bytes goes. A pure function of a table that all ranks share, so ranks cannot differ."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from fourfold.errors import EngineError

Algorithm = Literal["one_shot", "two_shot"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = ("one_shot", "two_shot")


class Plan(NamedTuple):
    """One of our kernels, and on how many programs at most."""

    algorithm: Algorithm
    programs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeTable:
    """Plans by size, ascending; what is larger than the last size has none."""

    sizes: tuple[int, ...]
    """Bytes up to which the plan at the same place holds."""
    plans: tuple[Plan | None, ...]
    """None: the library is faster."""

    def plan(self, nbytes: int) -> Plan | None:
        """For a sum of ``nbytes``; None: leave it to the library."""
        place = bisect_left(self.sizes, nbytes)
        return self.plans[place] if place < len(self.sizes) else None

    def encode(self) -> str:
        """As text that ``decode`` takes."""
        return json.dumps([[size, plan and [plan.algorithm, plan.programs]] for size, plan in self._rows()])

    @classmethod
    def decode(cls, text: str) -> SizeTable:
        """The table that ``encode`` wrote; raises EngineError for anything else."""
        try:
            rows = [
                (int(size), None if plan is None else Plan(plan[0], int(plan[1]))) for size, plan in json.loads(text)
            ]
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise EngineError(f"{text[:80]!r} is no table of sizes: {error}") from error
        sizes, plans = tuple(size for size, _ in rows), tuple(plan for _, plan in rows)
        if list(sizes) != sorted(set(sizes)) or any(plan and plan.algorithm not in ALGORITHMS for plan in plans):
            raise EngineError(f"{text[:80]!r} is no table of sizes: sizes must ascend, and plans be known")
        return cls(sizes=sizes, plans=plans)

    def __str__(self) -> str:
        """In one line, for the log: neighbours of one plan together."""
        parts: list[str] = []
        rows = self._rows()
        for place, (size, plan) in enumerate(rows):
            if place + 1 == len(rows) or rows[place + 1][1] != plan:
                name = "library" if plan is None else f"{plan.algorithm} on {plan.programs}"
                parts.append(f"up to {size >> 10} KB {name}")
        return "; ".join([*parts, "above: library"])

    def _rows(self) -> list[tuple[int, Plan | None]]:
        return list(zip(self.sizes, self.plans))
