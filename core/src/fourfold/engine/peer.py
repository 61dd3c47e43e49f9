"""The way from an engine to an API server or to the coordinator, and what is known there. Never waits."""

from __future__ import annotations

import time

import msgspec
import zmq

from fourfold.coordinator.waves import CoordinatorNotice
from fourfold.messages import EngineMessage, EngineReport, EngineStats


class Peer:
    """The way to an API server or to the coordinator, and what it knows."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, max_queued: int) -> None:
        self.lost: set[str] = set()
        """Requests that ended because their outputs could not be sent."""
        self.last_stats: EngineStats | None = None
        self.last_send = 0.0
        self.marks = b""
        """What it was told of the prefix cache."""
        self._context = context
        self._address = address
        self._max_queued = max_queued
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(max_queued)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: EngineMessage | EngineReport | CoordinatorNotice) -> bool:
        """Send without waiting; False when too many messages wait already."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def note(self, stats: EngineStats, marks: bytes) -> None:
        """Remember what was sent just now."""
        self.last_stats, self.last_send, self.marks = stats, time.monotonic(), marks

    def renewed(self) -> Peer:
        """The way to the process that takes its place; what waits for the old one is dropped."""
        self._socket.close(0)
        return Peer(self._context, self._address, self._max_queued)
