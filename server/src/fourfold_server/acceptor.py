"""Accepts the connections of all API servers and hands them out in turn. Knows no HTTP.

One process accepts for all: where several accept on one port, the kernel decides who gets how many, and a connection
waits for a server that has died.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable

from fourfold.errors import EngineError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
"""Until the next try when connections cannot be accepted, as for want of descriptors."""
_STOP_TIMEOUT = 5.0


class Acceptor:
    """A thread that accepts; the servers take turns. All methods are safe from any thread."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """``take`` is for API server 0, which lives in this process; it is called on the thread of the acceptor."""
        self._listener = listener
        self._take = take
        self._lock = threading.Lock()
        self._channels: dict[int, socket.socket] = {}
        self._turn = 0
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="acceptor", daemon=True)

    def start(self) -> None:
        """Begin to accept; call once."""
        self._listener.setblocking(False)
        self._thread.start()

    def add(self, index: int, channel: socket.socket) -> None:
        """Hand connections to API server ``index`` too; it reads them from the other end of ``channel``."""
        channel.setblocking(False)
        with self._lock:
            self._channels[index] = channel

    def remove(self, index: int) -> None:
        """Hand none to it any more; twice is harmless. The channel is its owner's to close."""
        with self._lock:
            self._channels.pop(index, None)

    def remove_all(self) -> None:
        """Hand all to API server 0 from now on."""
        with self._lock:
            self._channels.clear()

    def close(self) -> None:
        """Accept no more; twice is harmless. The listener is its owner's to close."""
        if self._thread.is_alive():
            self._stop.send(b"s")
            self._thread.join(_STOP_TIMEOUT)
        self._stop.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._stopped:
            selector.register(self._stopped, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not any(key.fileobj is self._stopped for key, _ in selector.select()):
                try:
                    self._accept()
                except OSError as error:
                    logger.error("cannot accept connections: %s; trying again", error.strerror)
                    selector.unregister(self._listener)
                    if selector.select(_RETRY_SECONDS):
                        return
                    selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        """Accept all that wait now."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._hand_out(connection)

    def _hand_out(self, connection: socket.socket) -> None:
        with self._lock:
            takers = [0, *sorted(self._channels)]
            first = next((place for place, taker in enumerate(takers) if taker >= self._turn), 0)
            for taker in (*takers[first:], *takers[:first]):
                self._turn = taker + 1
                if taker == 0:
                    self._take(connection)
                    return
                try:
                    socket.send_fds(self._channels[taker], [b"c"], [connection.fileno()])
                except OSError as error:  # it has died, or reads nothing
                    logger.warning("API server %d takes no connection: %s", taker, error.strerror)
                else:
                    connection.close()
                    return


def receive_connection(channel: socket.socket) -> socket.socket | None:
    """A connection that was handed out; None when there is none now. Raises EngineError once the acceptor has gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    except BlockingIOError:
        return None
    if not message:
        raise EngineError("the process that accepts connections has gone")
    return socket.socket(fileno=descriptors[0]) if descriptors else None
