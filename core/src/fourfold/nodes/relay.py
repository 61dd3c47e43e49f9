"""Makes sockets of one node's run directory reachable from another node's, by their names. Knows no message.

Whoever is on the other node has an inlet here, in whose place it is; what comes in goes over the connection, and is put
there into the socket of that name.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import zmq

from fourfold.addresses import socket_address

logger = logging.getLogger(__name__)

_MAX_QUEUED: Final = 65536
"""Messages that may wait for a process that reads none."""
_JOIN_TIMEOUT: Final = 5.0


class Relay:
    """Inlets are read on a thread of its own; outlets are written on the caller's. Safe from every thread."""

    def __init__(self, run_directory: Path, forward: Callable[[str, bytes], None]) -> None:
        """``forward`` gets, on the thread, the name of an inlet and what came in there."""
        self._run_directory = run_directory
        self._forward = forward
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._outlets: dict[str, _Outlet] = {}
        self._inlets: dict[str, zmq.Socket[bytes]] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake_event, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def open_inlet(self, name: str) -> None:
        """Be, on this node, the socket ``name`` of another node."""
        self._do(partial(self._bind, name))

    def close_inlet(self, name: str) -> None:
        """Be it no more; one that is not there is ignored."""
        self._do(partial(self._unbind, name))

    def open_outlet(self, name: str) -> None:
        """Let ``deliver`` reach the socket ``name`` of this node; what waits for an earlier owner is dropped."""
        self.close_outlet(name)
        with self._lock:
            self._outlets[name] = _Outlet(socket_address(self._run_directory, name))

    def close_outlet(self, name: str) -> None:
        """Deliver nothing to it any more; one that is not there is ignored."""
        with self._lock:
            outlet = self._outlets.pop(name, None)
        if outlet is not None:
            outlet.close()

    def deliver(self, name: str, message: bytes) -> None:
        """Put a message into the socket ``name`` of this node; dropped where no such outlet is open."""
        with self._lock:
            outlet = self._outlets.get(name)
            if outlet is not None and not outlet.send(message):
                logger.error("dropped a message for %s, which reads none", name)

    def close(self) -> None:
        """Close everything. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._do(lambda: None)
        self._thread.join(_JOIN_TIMEOUT)
        with self._lock:
            for inlet in self._inlets.values():
                inlet.close(0)
            for outlet in self._outlets.values():
                outlet.close()
            self._outlets.clear()
            os.close(self._wake_event)
        self._context.term()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        os.eventfd_write(self._wake_event, 1)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            ready = dict(self._poller.poll())
            if self._wake_event in ready:
                os.eventfd_read(self._wake_event)
                while self._tasks:
                    self._tasks.popleft()()
            for name, inlet in list(self._inlets.items()):
                if inlet in ready:
                    self._empty(name, inlet)

    def _empty(self, name: str, inlet: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = inlet.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._forward(name, message)

    def _bind(self, name: str) -> None:
        if name not in self._inlets:
            inlet = self._context.socket(zmq.PULL)
            inlet.bind(socket_address(self._run_directory, name))
            self._inlets[name] = inlet
            self._poller.register(inlet, zmq.POLLIN)

    def _unbind(self, name: str) -> None:
        inlet = self._inlets.pop(name, None)
        if inlet is not None:
            self._poller.unregister(inlet)
            inlet.close(0)


class _Outlet:
    """The way to one socket, with a context of its own: only its end makes sure that nothing leaves any more."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(_MAX_QUEUED)
        self._socket.connect(address)

    def send(self, message: bytes) -> bool:
        """Send without waiting; False where too many wait."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop what waits."""
        self._socket.close(0)
        self._context.term()
