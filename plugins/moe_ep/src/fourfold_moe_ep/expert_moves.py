"""What has to move from one map of a layer to another; pure arithmetic. P physical experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Move(NamedTuple):
    """The expert at ``source`` is to be at ``place`` too; both are physical experts."""

    source: int
    place: int


def spread_places(balanced: NDArray[np.int32], owners: Sequence[int]) -> NDArray[np.int32]:
    """A map [L, P] in the order of ranks -> the same in the order in which ``owners`` places physical experts."""
    placed = np.empty_like(balanced)
    placed[:, np.argsort(np.asarray(owners), kind="stable")] = balanced
    return placed


def settle(new: NDArray[np.int32], old: NDArray[np.int32], owners: Sequence[int]) -> NDArray[np.int32]:
    """``new`` [P] with the places of each rank in another order: experts that stay on a rank stay in their place."""
    settled = np.full_like(new, -1)
    places: dict[int, list[int]] = {}
    for place, owner in enumerate(owners):
        places.setdefault(owner, []).append(place)
    for mine in places.values():
        left = [int(new[place]) for place in mine]
        for place in mine:
            if int(old[place]) in left:
                settled[place] = old[place]
                left.remove(int(old[place]))
        for place in mine:
            if settled[place] < 0:
                settled[place] = left.pop(0)
    return settled


def moves_of(old: NDArray[np.int32], new: NDArray[np.int32], owners: Sequence[int]) -> list[Move]:
    """For every place that changes, a copy to fill it from: of its own rank where there is one."""
    moves = []
    for place in np.flatnonzero(old != new).tolist():
        copies = np.flatnonzero(old == new[place]).tolist()
        near = [copy for copy in copies if owners[copy] == owners[place]]
        moves.append(Move(source=(near or copies)[0], place=place))
    return moves
