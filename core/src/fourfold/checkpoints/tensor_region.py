"""A box within a tensor: where one slice of it lies in the whole. Knows no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec


class TensorRegion(msgspec.Struct, frozen=True, array_like=True):
    """From ``start`` on, ``shape`` long, in every dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """The end in every dimension."""
        return tuple(start + extent for start, extent in zip(self.start, self.shape))

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return 0 in self.shape

    def intersection(self, other: TensorRegion) -> TensorRegion:
        """What both hold; empty where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return TensorRegion(start, tuple(max(0, last - first) for first, last in zip(start, stop)))

    def contains(self, other: TensorRegion) -> bool:
        """Whether all of ``other`` is in it."""
        return self.intersection(other) == other

    def within(self, outer: TensorRegion) -> tuple[slice, ...]:
        """The index of this region in a tensor that holds ``outer`` alone."""
        firsts = [mine - theirs for mine, theirs in zip(self.start, outer.start)]
        return tuple(slice(first, first + extent) for first, extent in zip(firsts, self.shape))


def region_of(index: slice | tuple[slice, ...], shape: Sequence[int]) -> TensorRegion:
    """The region that ``tensor[index]`` reads of a tensor of ``shape``."""
    given = index if isinstance(index, tuple) else (index,)
    full = (*given, *[slice(None)] * (len(shape) - len(given)))
    bounds = [part.indices(extent)[:2] for part, extent in zip(full, shape)]
    return TensorRegion(tuple(start for start, _ in bounds), tuple(max(0, stop - start) for start, stop in bounds))


def is_covered(shape: Sequence[int], regions: Iterable[TensorRegion]) -> bool:
    """Whether every element of a tensor of ``shape`` is in one of the regions, which may overlap."""
    known = list(regions)
    cuts = [
        sorted({0, extent, *(region.start[dim] for region in known), *(region.stop[dim] for region in known)})
        for dim, extent in enumerate(shape)
    ]
    cells = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    return all(any(region.contains(_cell(cell)) for region in known) for cell in cells)


def _cell(edges: tuple[tuple[int, int], ...]) -> TensorRegion:
    return TensorRegion(tuple(first for first, _ in edges), tuple(last - first for first, last in edges))
