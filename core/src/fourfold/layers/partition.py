"""Which part of a layer each rank holds: heads, features and vocabulary rows. Knows no torch and no communicator."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import ConfigError

FEATURE_UNIT = 64
"""Features stay together in units of up to this many, so that kernels keep whole vectors."""
VOCABULARY_UNIT = 64
"""Vocabulary rows of a rank are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCut:
    """The attention heads of one rank, by their numbers in the whole model.

    Its kv heads may serve unequally many of its query heads: 5 of 9 heads over 3 kv heads use kv head 0 three times and
    kv head 1 twice.
    """

    heads: range
    kv_heads: range
    """Key and value heads; neighbouring ranks may hold the same one."""
    group_sizes: tuple[int, ...]
    """Query heads of this rank that each of ``kv_heads`` serves."""


def cut_heads(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadCut:
    """The heads of ``rank``: as even as whole query heads allow, earlier ranks take the remainder."""
    if world_size > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size is {world_size}, but the model has {num_heads} query heads; from 1 to {num_heads}"
        )
    heads = cut_evenly(num_heads, rank, world_size)
    group = num_heads // num_kv_heads
    kv_heads = range(heads[0] // group, heads[-1] // group + 1)
    sizes = tuple(sum(head // group == kv_head for head in heads) for kv_head in kv_heads)
    return HeadCut(heads=heads, kv_heads=kv_heads, group_sizes=sizes)


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
