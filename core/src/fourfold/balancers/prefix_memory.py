"""Which engine holds which prefix: what engines say of themselves, and what this API server sent them since.

Both are bounded, whatever users send. Knows no loads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.engine.prefix_cache import MARKED_DEPTHS, MAX_MARKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_HOLDERS = 4
"""Engines remembered a prefix: enough to have one with little to do among them."""
TOLD_MARKS = 1 << 18
"""Marks remembered of what all engines say; of each the last used ones."""
SENT_MARKS = 1 << 15
"""Marks remembered of what was sent, at least; more with many engines."""


class PrefixMemory:
    """Prefixes by their marks; a longer prefix has more of them."""

    def __init__(self, num_engines: int) -> None:
        self._told: list[set[int]] = [set() for _ in range(num_engines)]
        self._holders: dict[int, tuple[int, ...]] = {}
        """Mark -> engines that said they hold it."""
        self._max_told = max(1, min(MAX_MARKS, TOLD_MARKS // num_engines))
        self._sent: dict[int, int] = {}
        """Mark -> the life of an engine that got it last; of these two tables the older is forgotten as a whole."""
        self._sent_before: dict[int, int] = {}
        self._max_sent = max(SENT_MARKS, 512 * num_engines) // 2
        self._lives = list(range(num_engines))
        """Of each engine a number that it has had in no earlier life."""

    def longest(self, marks: Sequence[int], ready: NDArray[np.bool_]) -> tuple[list[int], int]:
        """The ready engines that hold the longest known prefix, and its length in blocks; none and 0 if no one does."""
        told, sent, before = self._holders, self._sent, self._sent_before
        for index in range(len(marks) - 1, -1, -1):
            mark = marks[index]
            if mark in told or mark in sent or mark in before:
                found = self._find(mark, ready)
                if found:
                    return found, index + 1
        return [], 0

    def send(self, marks: Sequence[int], engine: int) -> None:
        """A prompt was sent to ``engine``, which will hold it soon."""
        if not marks:
            return
        life, sent = self._lives[engine], self._sent
        for depth in MARKED_DEPTHS[: bisect_right(MARKED_DEPTHS, len(marks))]:
            sent[marks[depth - 1]] = life
        sent[marks[-1]] = life
        if len(sent) >= self._max_sent:
            self._sent_before, self._sent = sent, {}

    def learn(self, engine: int, marks: Sequence[int]) -> None:
        """``engine`` holds these and no others, the last used one last; if none, what was sent to it is gone too."""
        if not marks:
            self._lives[engine] += len(self._lives)
        now, before, holders = set(marks[-self._max_told :]), self._told[engine], self._holders
        for mark in before - now:
            left = tuple(holder for holder in holders.get(mark, ()) if holder != engine)
            if left:
                holders[mark] = left
            else:
                holders.pop(mark, None)
        for mark in now - before:
            known = holders.get(mark, ())
            if len(known) < MAX_HOLDERS:
                holders[mark] = (*known, engine)
        self._told[engine] = now

    def _find(self, mark: int, ready: NDArray[np.bool_]) -> list[int]:
        found = [engine for engine in self._holders.get(mark, ()) if ready[engine]]
        life = self._sent.get(mark)
        if life is None:
            life = self._sent_before.get(mark)
        if life is not None:
            engine = life % len(self._lives)
            if life == self._lives[engine] and ready[engine] and engine not in found:
                found.append(engine)
        return found
