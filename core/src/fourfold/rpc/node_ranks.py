"""An engine's side of ranks on other nodes: where they connect, which have come, and what they answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fourfold.errors import ConfigError, EngineError
from fourfold.manifest import Fingerprint, compare
from fourfold.nodes.listener import NodeListener
from fourfold.nodes.secret import ClusterSecret
from fourfold.rpc.channels import NodeWay
from fourfold.rpc.frames import Frame
from fourfold.rpc.rank_link import LOST, SHOWN, pack, unpack


class NodeJoin(msgspec.Struct, frozen=True, kw_only=True):
    """How a node that has ranks of an engine introduces itself."""

    place: int
    """Which of the nodes it is."""
    fingerprint: Fingerprint


class NodeRanks:
    """The ranks that are not on the engine's node. Answers are taken on the thread of the listener."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        secret: ClusterSecret,
        places: Mapping[int, Sequence[int]],
        fingerprint: Fingerprint,
        on_lost: Callable[[int, str], None],
        option: str,
    ) -> None:
        """Listen for the nodes of ``places`` (place -> its ranks) that run on what ``fingerprint`` says.

        ``on_lost`` hears of a rank that is lost, and how. Raises ConfigError, naming ``option``, for an address or port
        that cannot be had.
        """
        self._places = {place: tuple(ranks) for place, ranks in places.items()}
        self._fingerprint = fingerprint
        self._on_lost = on_lost
        self._take: Callable[[int, Frame], None] | None = None
        self._changed = threading.Condition()
        self._nodes: dict[int, str] = {}
        """Place -> the node there."""
        self._refusals: list[str] = []
        self._closed: str | None = None
        """Why nobody is waited for any more."""
        self._processes: dict[str, list[dict[str, Any]]] = {}
        self._listener = NodeListener(
            address,
            port,
            secret=secret,
            admit=self._admit,
            on_message=self._hear,
            on_lost=self._mourn,
            option=option,
        )
        self.url = self._listener.url

    def wait(self, timeout: float, *, started: float | None = None) -> None:
        """Wait until every place has its node, ``timeout`` seconds from ``started``, a ``time.monotonic``, or from now.

        Raises ConfigError for one that does not fit, EngineError past the deadline, or with the reason of ``close``.
        """
        deadline = (time.monotonic() if started is None else started) + timeout
        with self._changed:
            while missing := [place for place in self._places if place not in self._nodes]:
                if self._refusals:
                    raise ConfigError(self._refusals[0])
                if self._closed is not None:
                    raise EngineError(self._closed)
                left = deadline - time.monotonic()
                if left <= 0:
                    nodes = ", ".join(map(str, missing))
                    raise EngineError(f"no node has joined {self.url} as number {nodes} within {timeout:g} s")
                self._changed.wait(left)

    def ways(self, take: Callable[[int, Frame], None]) -> list[NodeWay]:
        """One a node, for ``Channels``, whose ``take`` gets the answers."""
        self._take = take
        return [
            NodeWay(ranks, lambda frame, place=place: self._send(place, frame))  # type: ignore[misc]
            for place, ranks in self._places.items()
        ]

    def node_of(self, rank: int) -> str:
        """The node that a rank is on; empty for one of this node."""
        return next((self._nodes.get(place, "") for place, ranks in self._places.items() if rank in ranks), "")

    def processes(self) -> list[dict[str, Any]]:
        """Of the ranks, as the nodes have told: rows of ``/topology``."""
        return [row for node in self._nodes.values() for row in self._processes.get(node, [])]

    def close(self, reason: str) -> None:
        """Tell the nodes why, which ends their ranks; whoever waits for nodes hears it too. Idempotent."""
        with self._changed:
            if self._closed is None:
                self._closed = reason
            self._changed.notify_all()
        self._listener.close(reason)

    def _send(self, place: int, frame: Frame) -> None:
        self._listener.send(self._nodes.get(place, ""), pack(frame))

    # --- on the thread of the listener -------------------------------------------------------------------------------

    def _admit(self, node: str, body: bytes) -> bytes:
        join = msgspec.msgpack.decode(body, type=NodeJoin)
        try:
            if join.place not in self._places:
                raise ConfigError(f"it is node {join.place}, and here are {sorted(self._places)} to join")
            if join.place in self._nodes:
                raise ConfigError(f"node {join.place} is here already, as {self._nodes[join.place]}")
            compare(self._fingerprint, join.fingerprint)
        except Exception as error:
            with self._changed:
                self._refusals.append(f"node {node} does not fit: {error}")
                self._changed.notify_all()
            raise
        with self._changed:
            self._nodes[join.place] = node
            self._changed.notify_all()
        return b""

    def _hear(self, node: str, message: bytes) -> None:
        rank, frame = unpack(message)
        if frame.kind == SHOWN:
            self._processes[node] = msgspec.msgpack.decode(frame.payload, type=list[dict[str, Any]])
        elif frame.kind == LOST:
            self._on_lost(rank, bytes(frame.payload).decode())
        elif self._take is not None:
            self._take(rank, frame)

    def _mourn(self, node: str, reason: str, planned: bool) -> None:
        with self._changed:
            places = [place for place, one in self._nodes.items() if one == node]
            for place in places:
                del self._nodes[place]
            self._changed.notify_all()
        for place in places:
            # One is enough: the engine fails with it.
            self._on_lost(self._places[place][0], f"is lost with node {node}: {reason}")
