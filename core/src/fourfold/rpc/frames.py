"""Messages over a stream socket: a kind, the number of a call, a payload of any size. Knows neither calls nor ranks."""

from __future__ import annotations

import socket
import struct
from collections import deque
from enum import IntEnum
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct("<BQQ")  # kind, number of the call, bytes of the payload
_CHUNK: Final = 64 * 1024
"""Bytes read at once; a payload that is larger is read straight into its own memory."""


class Kind(IntEnum):
    """What a frame is."""

    CALL = 1
    """To a rank: run a method."""
    REPLY = 2
    """From a rank: it is done, and this came of it."""
    DONE = 3
    """From a rank: it is done, and what came of it is not asked for."""
    ERROR = 4
    """From a rank: it failed, and the payload says why."""


class Frame(NamedTuple):
    """One message."""

    kind: int
    number: int
    payload: bytes | bytearray


class FrameReader:
    """Cuts what arrives on a stream into frames; works on blocking and on non-blocking sockets."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._begun = b""
        """The first bytes of a header that is not there as a whole."""
        self._frame: Frame | None = None
        """A frame whose payload is not there as a whole."""
        self._rest = memoryview(b"")
        """What is still to be filled of that payload."""

    def read(self) -> list[Frame]:
        """The frames that one read completes, often none. Raises EOFError at the end, OSError as the socket does."""
        if self._frame is not None:
            return self._read_rest(self._frame)
        received = self._stream.recv(_CHUNK)
        if not received:
            raise EOFError
        return self._cut(self._begun + received)

    def _read_rest(self, frame: Frame) -> list[Frame]:
        count = self._stream.recv_into(self._rest)
        if not count:
            raise EOFError
        self._rest = self._rest[count:]
        if self._rest:
            return []
        self._frame = None
        return [frame]

    def _cut(self, data: bytes) -> list[Frame]:
        frames, place = [], 0
        while len(data) - place >= _HEADER.size:
            kind, number, size = _HEADER.unpack_from(data, place)
            place += _HEADER.size
            payload = data[place : place + size]
            place += len(payload)
            if len(payload) < size:
                whole = bytearray(size)
                whole[: len(payload)] = payload
                self._frame, self._rest = Frame(kind, number, whole), memoryview(whole)[len(payload) :]
                break
            frames.append(Frame(kind, number, payload))
        self._begun = data[place:]
        return frames


class FrameWriter:
    """Sends frames over a non-blocking stream; what finds no room waits here for ``flush``."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._waiting: deque[memoryview] = deque()

    def put(self, frame: Frame) -> bool:
        """Send a frame after those before it; whether nothing is left to send. Nothing goes to one who has closed."""
        self._waiting.extend(map(memoryview, _pieces(frame)))
        return self.flush()

    def flush(self) -> bool:
        """Send what there is room for; whether nothing is left to send."""
        try:
            while self._waiting:
                piece = self._waiting[0]
                sent = self._stream.send(piece)
                if sent == len(piece):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = piece[sent:]
        except BlockingIOError:
            return False
        except OSError:  # the other side has ended, which is noticed elsewhere
            self._waiting.clear()
        return True


def send_frame(stream: socket.socket, frame: Frame) -> None:
    """Send a frame over a blocking stream; raises OSError when the other side has closed."""
    for piece in _pieces(frame):
        stream.sendall(piece)


def _pieces(frame: Frame) -> list[bytes | bytearray]:
    """What goes over the wire; a large payload is not copied behind its header."""
    header = _HEADER.pack(frame.kind, frame.number, len(frame.payload))
    return [header + frame.payload] if len(frame.payload) < _CHUNK else [header, frame.payload]
