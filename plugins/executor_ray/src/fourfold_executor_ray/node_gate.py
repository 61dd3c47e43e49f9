"""One node's connection to an executor on another one, and the ranks behind it. Lives in an actor of that node."""

from __future__ import annotations

import logging
import socket

import msgspec

from fourfold.config.transport import decode_config
from fourfold.manifest import fingerprint
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.secret import ClusterSecret
from fourfold.plugins import load_plugins
from fourfold.rpc.node_ranks import NodeJoin
from fourfold.rpc.rank_agent import RankAgent
from fourfold_executor_ray.door import Door
from fourfold_executor_ray.messages import NodeOrders

logger = logging.getLogger(__name__)


class NodeGate:
    """There until the executor hangs up, which ends the ranks; so does the end of this process."""

    def __init__(self, orders: NodeOrders) -> None:
        """Raises ConfigError when the executor refuses this node, EngineError when it cannot be reached."""
        registry = load_plugins()
        invitation = orders.invitation
        found = fingerprint(decode_config(invitation.config, registry), registry.manifest, rank=orders.ranks[0])
        self._agent = RankAgent()
        self._door: Door | None = None
        self._connection = NodeConnection(
            invitation.url,
            secret=ClusterSecret(invitation.secret),
            node=orders.node,
            body=msgspec.msgpack.encode(NodeJoin(place=orders.place, fingerprint=found)),
            timeout=orders.timeout,
            on_message=self._agent.take,
            on_lost=self._close,
        )
        self._door = Door(orders.ranks, self._start)
        self.path = self._door.path
        """Where the ranks come in."""

    def _start(self, streams: dict[int, socket.socket]) -> None:
        self._agent.start(streams, self._connection.send)

    def _close(self, reason: str, planned: bool) -> None:
        if not planned:
            logger.error("the executor is lost: %s", reason)
        if self._door is not None:
            self._door.close()
        self._agent.close()
