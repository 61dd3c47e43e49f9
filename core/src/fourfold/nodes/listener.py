"""Where the nodes of a deployment connect. Knows who is there; what they say is its owner's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from fourfold.errors import ConfigError, FourfoldError
from fourfold.nodes.addresses import tcp_url
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

Admit = Callable[[str, bytes], bytes]
"""(node, what it says of itself) -> its welcome. Raises FourfoldError with the reason to refuse it."""
OnMessage = Callable[[str, bytes], None]
OnLost = Callable[[str, str, bool], None]
"""(node, why, whether it has said so itself)."""


@dataclass(kw_only=True, slots=True)
class _Node:
    name: str
    identity: bytes
    last_heard: float


class NodeListener:
    """Callbacks run on its thread, for each node in the order admit, messages, lost, and must return soon."""

    def __init__(
        self,
        address: str,
        port: int = 0,
        *,
        secret: ClusterSecret,
        admit: Admit,
        on_message: OnMessage,
        on_lost: OnLost,
        option: str = "the address and port for other nodes",
    ) -> None:
        """Bind once, for good; ``port`` 0 takes a free one. Raises ConfigError, naming ``option``, if it is taken."""
        self._admit = admit
        self._on_message = on_message
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # so that a node that has gone is an error
        socket.ipv6 = ":" in address
        socket.set_hwm(0)
        secret.secure_listener(socket)
        try:
            socket.bind(tcp_url(address, port or "*"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{option}: cannot listen on {tcp_url(address, port)}: {error.strerror}; give an address of this node "
                "and a port that is free"
            ) from error
        self.url = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """For ``NodeConnection``."""
        self.port = int(self.url.rpartition(":")[2])
        self._socket = SharedSocket(socket)
        self._nodes: dict[str, _Node] = {}
        self._by_identity: dict[bytes, _Node] = {}
        self._closing = False
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="node-listener", daemon=True)
        self._thread.start()

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    def send(self, node: str, content: bytes) -> bool:
        """Send a message without waiting; False if the node has gone. From any thread."""
        known = self._nodes.get(node)
        return known is not None and self._socket.send(known.identity, KINDS[Kind.DATA] + content)

    def close(self, reason: str) -> None:
        """Tell all nodes why, and listen no more. Idempotent; from any thread but its own it waits for the end."""
        if not self._closing:
            self._reason, self._closing = reason, True
            self._socket.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closing:
            # All that has arrived comes first: this process may have slept, and the others' signs of life waited.
            while (message := self._socket.receive()) is not None:
                self._take(message)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat(now)
            self._socket.wait(max(0.0, next_beat - now))
        for node in list(self._nodes.values()):
            self._socket.send(node.identity, KINDS[Kind.BYE] + self._reason.encode())
        self._nodes.clear()
        self._socket.close(linger=LINGER_SECONDS)
        self._context.term()

    def _beat(self, now: float) -> None:
        for node in list(self._nodes.values()):
            if not self._socket.send(node.identity, KINDS[Kind.BEAT]):
                self._lose(node, "its connection has ended")
            elif now - node.last_heard > SILENCE_SECONDS:
                self._lose(node, f"it has given no sign of life for {SILENCE_SECONDS:g} s")

    def _take(self, message: list[bytes]) -> None:
        identity, frame = message
        kind, content = frame[:1], frame[1:]
        node = self._by_identity.get(identity)
        if node is not None:
            node.last_heard = time.monotonic()
        try:
            if kind == KINDS[Kind.HELLO] and node is None:
                self._meet(identity, msgspec.msgpack.decode(content, type=Hello))
            elif node is None:
                self._refuse(identity, "this node was given up before")
            elif kind == KINDS[Kind.DATA]:
                self._on_message(node.name, content)
            elif kind == KINDS[Kind.BYE]:
                self._lose(node, content.decode(), planned=True)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("dropped what %s sent: %s", node.name if node else "somebody", error)
        except Exception:
            logger.exception("a message of node %s could not be handled", node.name if node else "?")

    def _meet(self, identity: bytes, hello: Hello) -> None:
        namesake = self._nodes.get(hello.node)
        if namesake is not None and not self._socket.send(namesake.identity, KINDS[Kind.BEAT]):
            self._lose(namesake, "its connection has ended")
            namesake = None
        try:
            if hello.protocol != PROTOCOL:
                raise ConfigError(
                    f"it speaks version {hello.protocol} of what travels between nodes, and this one {PROTOCOL}; "
                    "install the same fourfold on every node"
                )
            if namesake is not None:
                raise ConfigError("a node of this name is connected already")
            welcome = self._admit(hello.node, hello.body)
        except FourfoldError as error:
            logger.error("node %s is refused: %s", hello.node, error)
            self._refuse(identity, str(error))
            return
        node = _Node(name=hello.node, identity=identity, last_heard=time.monotonic())
        self._nodes[node.name] = self._by_identity[identity] = node
        self._socket.send(identity, KINDS[Kind.WELCOME] + welcome)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._socket.send(identity, KINDS[Kind.REFUSED] + reason.encode())

    def _lose(self, node: _Node, reason: str, *, planned: bool = False) -> None:
        self._nodes.pop(node.name, None)
        self._by_identity.pop(node.identity, None)
        self._on_lost(node.name, reason, planned)
