"""A node's connection to the listener of its deployment. Knows whether it stands; what is said is its owner's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from fourfold.errors import ConfigError, EngineError
from fourfold.nodes.addresses import is_ipv6, tcp_url
from fourfold.nodes.node_messages import (
    BEAT_SECONDS,
    KINDS,
    LINGER_SECONDS,
    PROTOCOL,
    SILENCE_SECONDS,
    Hello,
    Kind,
)
from fourfold.nodes.secret import ClusterSecret
from fourfold.nodes.shared_socket import SharedSocket

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT: Final = 5.0
_MAX_HANDSHAKES: Final = 3
"""That may fail before the secret is taken to be another one; the listener may just be about to end."""
_LOOK_EVERY: Final = 0.5
_FAILED_HANDSHAKE: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS: Final = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKE

OnMessage = Callable[[bytes], None]
OnLost = Callable[[str, bool], None]
"""(why, whether the listener has said so itself)."""


class NodeConnection:
    """Callbacks run on its thread and must return soon; ``on_lost`` comes once at most, and last."""

    def __init__(
        self,
        url: str,
        *,
        secret: ClusterSecret,
        node: str,
        body: bytes,
        timeout: float,
        on_message: OnMessage,
        on_lost: OnLost,
        stop: Callable[[], bool] = lambda: False,
        source: str | None = None,
    ) -> None:
        """Connect, introduce ``node`` with ``body``, and wait for the welcome; ``stop`` is asked meanwhile.

        ``source`` is the address of this host to connect from, by default that of the way to the listener.

        Raises ConfigError for a wrong secret and when it is refused, EngineError when nobody answers in time.
        """
        self.url = url
        self._on_message = on_message
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.ipv6 = is_ipv6(url.removeprefix("tcp://").rpartition(":")[0])
        socket.set_hwm(0)
        secret.secure_connection(socket)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = SharedSocket(socket)
        self._closing = False
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="node-connection", daemon=True)
        hello = Hello(protocol=PROTOCOL, node=node, body=body)
        try:
            socket.connect(url if source is None else f"{tcp_url(source, 0)};{url.removeprefix('tcp://')}")
            self._socket.send(KINDS[Kind.HELLO] + msgspec.msgpack.encode(hello))
            self.welcome = self._wait_for_welcome(timeout, stop)
            """What the listener's owner said to this node."""
        except BaseException:
            self._release(linger=0)
            raise
        self._thread.start()

    def send(self, content: bytes) -> bool:
        """Send a message without waiting; False once the connection is lost. From any thread."""
        return self._socket.send(KINDS[Kind.DATA] + content)

    def close(self, reason: str) -> None:
        """Tell the listener why, and end. Idempotent; from any thread but its own it waits for the end."""
        if not self._closing:
            self._reason, self._closing = reason, True
            self._socket.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT)

    def _wait_for_welcome(self, timeout: float, stop: Callable[[], bool]) -> bytes:
        deadline = time.monotonic() + timeout
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        failures, connected = 0, False
        while (left := deadline - time.monotonic()) > 0 and not stop():
            poller.poll(int(1000 * min(left, _LOOK_EVERY)) + 1)
            kind, content = _cut(self._socket.receive())
            if kind == KINDS[Kind.WELCOME]:
                return content
            if kind in (KINDS[Kind.REFUSED], KINDS[Kind.BYE]):
                raise ConfigError(f"the node at {self.url} refuses this one: {content.decode()}")
            for event in self._events():
                connected = connected or bool(event & zmq.EVENT_HANDSHAKE_SUCCEEDED)
                failures += bool(event & _FAILED_HANDSHAKE)
            if failures >= _MAX_HANDSHAKES and not connected:
                raise ConfigError(
                    f"the node at {self.url} has another --cluster-secret than this one, or is no node of a "
                    "deployment; give all nodes the same secret, and the port for nodes"
                )
        if stop():
            raise EngineError(f"joining the node at {self.url} was given up")
        raise EngineError(
            f"no node answers at {self.url} within {timeout:g} s; start it, and let the network pass this port"
        )

    def _run(self) -> None:
        self._socket.watch(self._monitor.fileno())
        ready = [self._monitor.fileno()]
        next_beat = 0.0
        last_heard = time.monotonic()
        lost: tuple[str, bool] | None = None
        while not self._closing and lost is None:
            while lost is None and (message := self._socket.receive()) is not None:
                last_heard = time.monotonic()
                lost = self._take(message)
            if self._monitor.fileno() in ready and any(event & _FAILED_HANDSHAKE for event in self._events()):
                lost = lost or (f"the connection to the node at {self.url} has ended", False)
            now = time.monotonic()
            if lost is None and now - last_heard > SILENCE_SECONDS:
                lost = (f"the node at {self.url} has given no sign of life for {SILENCE_SECONDS:g} s", False)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._socket.send(KINDS[Kind.BEAT])
            if lost is None and not self._closing:
                ready = self._socket.wait(max(0.0, next_beat - now))
        if lost is None:
            self._socket.send(KINDS[Kind.BYE] + self._reason.encode())
        self._release(linger=LINGER_SECONDS if lost is None else 0)
        if lost is not None:
            self._closing = True
            self._on_lost(*lost)

    def _take(self, message: list[bytes]) -> tuple[str, bool] | None:
        """Why the connection is over; None: it is not."""
        try:
            kind, content = _cut(message)
            if kind == KINDS[Kind.DATA]:
                self._on_message(content)
            elif kind == KINDS[Kind.BYE]:
                return content.decode(), True
            elif kind == KINDS[Kind.REFUSED]:
                return f"the node at {self.url} has given this one up: {content.decode()}", False
        except Exception:
            logger.exception("a message of the node at %s could not be handled", self.url)
        return None

    def _events(self) -> list[int]:
        found = []
        while self._monitor.poll(0):
            event: dict[str, Any] = recv_monitor_message(self._monitor, zmq.NOBLOCK)  # type: ignore[assignment]
            found.append(int(event["event"]))
        return found

    def _release(self, *, linger: float) -> None:
        self._socket.socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger=linger)
        self._context.term()


def _cut(message: list[bytes] | None) -> tuple[bytes, bytes]:
    """Kind and content; empty for no message."""
    frame = message[-1] if message else b""
    return frame[:1], frame[1:]
