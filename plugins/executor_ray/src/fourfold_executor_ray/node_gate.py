"""One node's connection to an executor on another one, and the ranks behind it. Lives in an actor of that node."""

from __future__ import annotations

import logging
import os
import socket

import msgspec

from fourfold.config.transport import decode_config
from fourfold.manifest import fingerprint
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.secret import ClusterSecret
from fourfold.plugins import load_plugins
from fourfold.rpc.node_ranks import NodeJoin
from fourfold.rpc.rank_agent import RankAgent
from fourfold.supervision.stopped_watch import StoppedWatch
from fourfold_executor_ray.door import Door, peer_pids
from fourfold_executor_ray.messages import NodeOrders

logger = logging.getLogger(__name__)


class NodeGate:
    """There until the executor hangs up, which ends the ranks; so does the end of this process."""

    def __init__(self, orders: NodeOrders) -> None:
        """Raises ConfigError when the executor refuses this node, EngineError when it cannot be reached."""
        registry = load_plugins()
        invitation = orders.invitation
        config = decode_config(invitation.config, registry)
        found = fingerprint(config, registry.manifest, rank=orders.ranks[0])
        self._stall_timeout = config.timeouts.stall_timeout
        self._watch: StoppedWatch | None = None
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
        self.door = self._door.name
        """Where the ranks come in."""

    def _start(self, streams: dict[int, socket.socket]) -> None:
        self._agent.start(streams, self._connection.send)
        # Of this rank, the connection tells: a stopped one gives no sign of life.
        others = {rank: pid for rank, pid in peer_pids(streams).items() if pid != os.getpid()}
        self._watch = StoppedWatch(others, limit=self._stall_timeout, on_killed=self._agent.lose)

    def _close(self, reason: str, planned: bool) -> None:
        if not planned:
            logger.error("the executor is lost: %s", reason)
        if self._door is not None:
            self._door.close()
        if self._watch is not None:
            self._watch.close()
        self._agent.close()
