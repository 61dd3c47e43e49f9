"""A zmq socket that one thread reads and any thread writes, without a hop from one to the other. Knows no message."""

from __future__ import annotations

import os
import select
import threading

import zmq


class SharedSocket:
    """``send`` from anywhere; ``wait`` and ``receive`` belong to one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(socket.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let ``wait`` return for this one too, and name it."""
        self._poll.register(descriptor, select.POLLIN)

    def send(self, *parts: bytes) -> bool:
        """Send without waiting; False when the other side has gone, or takes nothing, or this one is closed."""
        with self._lock:
            if self._wake < 0:
                return False
            try:
                for part in parts[:-1]:
                    self.socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
                self.socket.send(parts[-1], zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            finally:
                # Sending takes the signal of what has arrived meanwhile, for which the reader may be waiting.
                if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    os.eventfd_write(self._wake, 1)
        return True

    def receive(self) -> list[bytes] | None:
        """The next message; None when there is none now."""
        with self._lock:
            if self._wake < 0:
                return None
            try:
                return self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None

    def wait(self, seconds: float) -> list[int]:
        """Return when something may have arrived, when woken, or after ``seconds``: the watched ones that are ready."""
        ready = [descriptor for descriptor, _ in self._poll.poll(max(0, int(1000 * seconds) + 1))]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def wake(self) -> None:
        """Let ``wait`` return. From any thread."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self, *, linger: float) -> None:
        """Close it; what was sent may take ``linger`` seconds to leave. Twice is harmless."""
        with self._lock:
            if self._wake >= 0:
                self.socket.close(int(1000 * linger))
                os.close(self._wake)
                self._wake = -1
