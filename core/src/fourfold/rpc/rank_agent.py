"""A node's side of an engine's calls: one connection to the engine, a stream to each rank. Starts no process.

A call comes once for all ranks of the node and is handed to each; what a rank answers goes back with its number.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from fourfold.rpc.frames import Frame, FrameReader, FrameWriter
from fourfold.rpc.rank_link import LOST, SHOWN, pack, unpack

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT: Final = 5.0


class RankAgent:
    """Hands calls out and answers back. Its owner gives it what the connection brings, and ends the ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Frame] | None = []
        """Calls that came before the ranks."""
        self._ways: dict[int, _Way] = {}
        self._send: Callable[[bytes], bool] = lambda message: False
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="rank-agent", daemon=True)

    def take(self, message: bytes) -> None:
        """A message of the engine's. For ``NodeConnection``, in their order."""
        frame = unpack(message).frame
        with self._lock:
            if self._early is not None:
                self._early.append(frame)
            elif not self._put(frame):
                os.eventfd_write(self._wake, 1)

    def start(self, streams: Mapping[int, socket.socket], send: Callable[[bytes], bool]) -> None:
        """Take over our ends of the streams to the ranks; ``send`` is the connection's. Call once."""
        with self._lock:
            self._send = send
            self._ways = {rank: _Way(rank, stream) for rank, stream in streams.items()}
            self._selector.register(self._wake, selectors.EVENT_READ)
            for way in self._ways.values():
                self._selector.register(way.stream, selectors.EVENT_READ, way)
            early, self._early = self._early or [], None
            for frame in early:
                self._put(frame)
            os.eventfd_write(self._wake, 1)
        self._thread.start()

    def lose(self, rank: int, how: str) -> None:
        """Tell the engine that a rank's process has ended, after what it said last."""
        way = self._ways.get(rank)
        if way is not None:
            way.last_word = how
            with self._lock:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def show(self, processes: list[dict[str, Any]]) -> None:
        """Tell the engine of the ranks' processes; each a ``ProcessState`` as plain values."""
        self._send(pack(Frame(SHOWN, 0, msgspec.msgpack.encode(processes))))

    def close(self) -> None:
        """Close the streams, which ends the ranks. Idempotent; from any thread but its own."""
        with self._lock:
            self._closing = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT)
        with self._lock:
            if self._wake >= 0:
                self._selector.close()
                os.close(self._wake)
                self._wake = -1
                for way in self._ways.values():
                    way.stream.close()

    def _put(self, frame: Frame) -> bool:
        """Write to every rank what there is room for; whether that was all."""
        sent = True
        for way in self._ways.values():
            sent &= way.writer.put(frame)
        return sent

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                if key.data is None:
                    os.eventfd_read(self._wake)
                    self._say_last_words()
                    self._watch_room()
                    continue
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE and key.data.open:
                    self._watch_room()

    def _watch_room(self) -> None:
        with self._lock:
            for way in self._ways.values():
                if way.open:
                    events = selectors.EVENT_READ | (0 if way.writer.flush() else selectors.EVENT_WRITE)
                    self._selector.modify(way.stream, events, way)

    def _read(self, way: _Way) -> bool:
        """Hand on what one read brings; whether there may be more."""
        try:
            frames = way.reader.read()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # its owner tells how it ended
            way.open = False
            self._selector.unregister(way.stream)
            return False
        for frame in frames:
            self._send(pack(frame, way.rank))
        return True

    def _say_last_words(self) -> None:
        for way in self._ways.values():
            if way.last_word is not None and not way.mourned:
                while way.open and self._read(way):
                    pass
                way.mourned = True
                self._send(pack(Frame(LOST, 0, way.last_word.encode()), way.rank))


class _Way:
    """The stream to one rank and back."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.rank = rank
        self.stream = stream
        self.open = True
        self.reader = FrameReader(stream)
        self.writer = FrameWriter(stream)
        self.last_word: str | None = None
        """How its process ended."""
        self.mourned = False
