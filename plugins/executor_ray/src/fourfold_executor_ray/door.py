"""Where ranks of one host come in: a socket for processes of one user, there until all have come. Knows no call."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from fourfold.rpc.frames import FrameReader
from fourfold_executor_ray.messages import Arrival

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT: Final = 10.0
_JOIN_TIMEOUT: Final = 5.0
_CREDENTIALS: Final = struct.Struct("3i")  # pid, user and group, as Linux gives them


class Door:
    """Takes connections on a thread of its own until all ranks are there."""

    def __init__(self, ranks: Sequence[int], on_all: Callable[[dict[int, socket.socket]], None]) -> None:
        """``on_all`` gets the streams of ``ranks``, on that thread, and owns them; it is not called after ``close``."""
        self._ranks = frozenset(ranks)
        self._on_all = on_all
        self._streams: dict[int, socket.socket] = {}
        self.name = f"fourfold-ray-{secrets.token_hex(8)}"
        """For ``enter``. It is no file, so that none is left however this process ends."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(self.name))
        self._listener.listen(len(ranks))
        self._thread = threading.Thread(target=self._run, name="ray-door", daemon=True)
        self._thread.start()

    def has_let_in(self, rank: int) -> bool:
        """Whether a rank has come."""
        return rank in self._streams

    def close(self) -> None:
        """Let nobody in any more, and send those away that came before all had. Idempotent."""
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        try:
            with self._listener:
                while self._ranks - self._streams.keys():
                    self._let_in(self._listener.accept()[0])
        except OSError:  # closed
            for stream in self._streams.values():
                stream.close()
        else:
            self._on_all(self._streams)

    def _let_in(self, stream: socket.socket) -> None:
        stream.settimeout(_HELLO_TIMEOUT)
        try:
            user = _credentials(stream)[1]
            if user != os.getuid():
                raise PermissionError(f"user {user} is not that of this process")
            rank = _read_arrival(stream).rank
        # A size that is none overflows, or finds no memory.
        except (OSError, EOFError, OverflowError, MemoryError, msgspec.MsgspecError) as error:
            logger.warning("somebody at the door %s was no rank: %s", self.name, error)
            stream.close()
            return
        stream.settimeout(None)
        self._streams[rank] = stream


def enter(name: str, timeout: float) -> socket.socket:
    """Come in by the door of this name. Raises OSError."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(timeout)
    try:
        stream.connect(_address(name))
    except OSError:
        stream.close()
        raise
    stream.settimeout(None)
    return stream


def peer_pids(streams: Mapping[int, socket.socket]) -> dict[int, int]:
    """Rank -> the process at the other end of its stream, where this one can see it."""
    found = {rank: _credentials(stream)[0] for rank, stream in streams.items()}
    return {rank: pid for rank, pid in found.items() if pid}


def _address(name: str) -> str:
    return f"\0{name}"  # of the abstract kind


def _credentials(stream: socket.socket) -> tuple[int, int, int]:
    """pid, user and group at the other end."""
    return _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def _read_arrival(stream: socket.socket) -> Arrival:
    reader = FrameReader(stream)
    while not (frames := reader.read()):
        pass
    # A rank says nothing more before it is asked, so the first frame is all that was read.
    return msgspec.msgpack.decode(frames[0].payload, type=Arrival)
