"""Where everything lies in the shared memory of one channel; the same on every rank. Knows nothing of torch.

Arrivals of all ranks, the bell of meetings, the mark of a broken channel, a bell a rank for messages, the counters of
every ring (source by destination), then two sets of slots, then the rings themselves. Pages take memory once touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LINE: Final = 64
PAGE: Final = 4096
SLOT_BYTES: Final = 1 << 19
"""Of a collective that go in one piece: two sets of it stay in a core's second-level cache, and pieces are few."""
RING_BYTES: Final = 1 << 20
"""Of messages from one rank to another that may be on their way."""
MAX_RANKS: Final = 60
"""Failures are reported as bits of one 64-bit number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipeLayout:
    """Of the memory of one pipe: counters and bells, then a line for its message's length and a slot, ``depth`` times.

    The lines at the start: messages sent, messages taken, the receiver's bell, the sender's bell.
    """

    nbytes: int
    """Of the longest message."""
    depth: int

    @property
    def slots(self) -> int:
        """Offset of the first slot's length."""
        return 4 * LINE

    @property
    def slot_bytes(self) -> int:
        """Room for a message."""
        return up(self.nbytes, LINE)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.slots + self.depth * (LINE + self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelLayout:
    """Offsets in bytes from the channel's start."""

    world_size: int
    slot_bytes: int = SLOT_BYTES
    ring_bytes: int = RING_BYTES

    @property
    def bell(self) -> int:
        """Rung when a meeting is complete."""
        return self.world_size * LINE

    @property
    def broken(self) -> int:
        """Not 0 once a rank has given up."""
        return self.bell + LINE

    def message_bell(self, rank: int) -> int:
        """Rung when a message for ``rank``, or room for one from it, appears."""
        return self.broken + LINE * (1 + rank)

    def ring_counters(self, source: int, destination: int) -> int:
        """Bytes written, and a line further bytes read."""
        return self.message_bell(self.world_size) + 2 * LINE * (source * self.world_size + destination)

    @property
    def slots(self) -> int:
        """[2][world_size][slot_bytes]."""
        return up(self.ring_counters(self.world_size, 0), PAGE)

    def ring(self, source: int, destination: int) -> int:
        """[ring_bytes] of one direction."""
        place = source * self.world_size + destination
        return self.slots + 2 * self.world_size * self.slot_bytes + place * self.ring_bytes

    @property
    def nbytes(self) -> int:
        """All of it."""
        return up(self.ring(self.world_size, 0), PAGE)


def up(value: int, unit: int) -> int:
    """``value``, or the next multiple of ``unit``."""
    return -(-value // unit) * unit
