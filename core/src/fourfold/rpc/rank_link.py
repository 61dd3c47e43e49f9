"""Calls and answers as they travel between an engine and a node that has several of its ranks. Knows no socket."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from fourfold.rpc.frames import Frame

LOST: Final = 0
"""In place of a frame's kind, from a node: the rank's process has ended, and the payload says how."""
SHOWN: Final = 255
"""The same: the processes of the node's ranks, as msgpack of rows for ``/topology``."""
_HEADER: Final = struct.Struct("<BIQ")  # kind, rank, number of the call


class RankFrame(NamedTuple):
    """A frame of a rank, or to all ranks of a node."""

    rank: int
    frame: Frame


def pack(frame: Frame, rank: int = 0) -> bytes:
    """A message; to a node ``rank`` is not looked at."""
    return _HEADER.pack(frame.kind, rank, frame.number) + frame.payload


def unpack(message: bytes) -> RankFrame:
    """What ``pack`` made. Raises ValueError for anything else."""
    if len(message) < _HEADER.size:
        raise ValueError(f"a message of {len(message)} bytes, which is no call and no answer")
    kind, rank, number = _HEADER.unpack_from(message)
    return RankFrame(rank, Frame(kind, number, message[_HEADER.size :]))
