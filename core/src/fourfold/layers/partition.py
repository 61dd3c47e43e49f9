"""Which part of a layer each rank holds: heads, features and vocabulary rows. Knows no torch and no communicator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.errors import ConfigError

FEATURE_UNIT = 64
"""Features stay together in units of up to this many, so that kernels keep whole vectors."""
VOCABULARY_UNIT = 64
"""Vocabulary rows of a rank are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCut:
    """The attention heads of one rank.

    A rank's query heads may use its kv heads unevenly: 5 of 9 heads over 3 kv heads use kv head 0 three times and kv
    head 1 twice. ``slots`` then holds an empty slot, so that every kv head serves equally many; an empty slot's query
    rows and output columns are zero, and the result is the same.
    """

    slots: tuple[int | None, ...]
    """Query heads of the whole model in local order; None is an empty slot."""
    kv_heads: range
    """Key and value heads of the whole model; neighbouring ranks may hold the same one."""

    @property
    def num_heads(self) -> int:
        """Query heads that this rank computes, empty slots included."""
        return len(self.slots)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads that this rank caches."""
        return len(self.kv_heads)

    def runs(self) -> Iterator[tuple[int, range]]:
        """(first local slot, consecutive query heads) of every filled stretch."""
        start = 0
        while start < len(self.slots):
            head = self.slots[start]
            if head is None:
                start += 1
                continue
            stop = start + 1
            while stop < len(self.slots) and self.slots[stop] == head + stop - start:
                stop += 1
            yield start, range(head, head + stop - start)
            start = stop


def cut_heads(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadCut:
    """The heads of ``rank``: as even as whole query heads allow, earlier ranks take the remainder."""
    if world_size > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size is {world_size}, but the model has {num_heads} query heads; from 1 to {num_heads}"
        )
    heads = cut_evenly(num_heads, rank, world_size)
    group = num_heads // num_kv_heads
    kv_heads = range(heads[0] // group, heads[-1] // group + 1)
    owned = [[head for head in heads if head // group == kv_head] for kv_head in kv_heads]
    width = max(map(len, owned))
    slots: list[int | None] = []
    for members in owned:
        slots += members
        slots += [None] * (width - len(members))
    return HeadCut(slots=tuple(slots), kv_heads=kv_heads)


def cut_evenly(count: int, rank: int, world_size: int) -> range:
    """The part of ``count`` things that ``rank`` holds; sizes differ by at most one."""
    each, left = divmod(count, world_size)
    start = rank * each + min(rank, left)
    return range(start, start + each + (rank < left))


def cut_features(size: int, rank: int, world_size: int) -> range:
    """The part of ``size`` features that ``rank`` holds, in the largest units that give every rank some."""
    unit = FEATURE_UNIT
    while unit > 1 and (size % unit or size // unit < world_size):
        unit //= 2
    units = cut_evenly(size // unit, rank, world_size)
    return range(units.start * unit, units.stop * unit)


def vocabulary_rows(vocab_size: int, world_size: int) -> int:
    """Rows of the vocabulary on every rank, padding included; one rank alone is not padded."""
    if world_size == 1:
        return vocab_size
    each = -(-vocab_size // world_size)
    return -(-each // VOCABULARY_UNIT) * VOCABULARY_UNIT
