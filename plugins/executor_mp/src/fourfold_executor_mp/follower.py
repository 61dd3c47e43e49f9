"""A node that has some ranks of an engine, which is on another node: joins it, starts them, hands calls out to them."""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import Final

import msgspec

from fourfold.entries import ExecutorContext
from fourfold.errors import EngineError
from fourfold.manifest import fingerprint
from fourfold.nodes.addresses import address_towards, own_address, tcp_url
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.secret import required_secret
from fourfold.plugins import load_plugins
from fourfold.rpc.node_ranks import NodeJoin
from fourfold.rpc.rank_agent import RankAgent
from fourfold_executor_mp.executor import part_of
from fourfold_executor_mp.rank_processes import RankProcesses

logger = logging.getLogger(__name__)

_GRACE: Final = 2.0
"""Seconds for ranks to let their workers go."""
_AFTER_END: Final = 10.0
"""Seconds to wait for an engine that has ended by itself, and may only have been restarted."""
_AFTER_LOSS: Final = 60.0
"""The same for one that has failed; whoever restarts it waits longer each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """Why the ranks were ended."""

    reason: str = ""
    """Empty: nothing was wrong."""
    stopped: bool = False
    """Whether this node was asked to end."""


class Follower:
    """See ``fourfold.contracts.executor.Follower``."""

    def __init__(self, context: ExecutorContext) -> None:
        """Raises ConfigError for a secret, an interface or an address that will not do."""
        nodes = context.config.nodes
        self._context = context
        self._secret = required_secret(context.config)
        self._url = tcp_url(nodes.master_address, nodes.master_port)
        self._source = own_address(nodes.node_interface, option="--node-interface") if nodes.node_interface else None
        address = self._source or address_towards(nodes.master_address)
        self._part = part_of(context, nodes.node_rank, address=address)
        self.name = self._part.node
        self._stopped = False
        self._ends: queue.SimpleQueue[_End] = queue.SimpleQueue()

    def run(self) -> None:
        """See the contract."""
        patience = self._context.config.timeouts.startup_timeout
        last: _End | None = None
        while True:
            try:
                end = self._follow(patience)
            except EngineError as error:
                if self._stopped or (last is not None and not last.reason):
                    return
                if last is None:
                    raise
                raise EngineError(f"node {self.name} has lost its engine ({last.reason}), and {error}") from error
            if end.stopped:
                return
            patience = _AFTER_LOSS if end.reason else _AFTER_END
            logger.info("the engine has ended: %s; waiting %g s for another one", end.reason or "as asked", patience)
            last = end

    def stop(self) -> None:
        """See the contract."""
        self._stopped = True
        self._ends.put(_End(stopped=True))

    def _follow(self, patience: float) -> _End:
        """Join an engine, which has to listen within ``patience`` seconds, and serve it to the end."""
        agent = RankAgent()
        ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._ends = ends
        connection = self._join(agent, ends, patience)
        processes = RankProcesses(self._part, stall_timeout=self._context.config.timeouts.stall_timeout)
        try:
            agent.start(processes.streams, connection.send)
            processes.start(agent.lose)
            agent.show(processes.rows())
            if self._stopped:
                return _End(stopped=True)
            return ends.get()
        finally:
            connection.close("it was told to end" if self._stopped else "its ranks have failed")
            agent.close()
            processes.close(_GRACE)

    def _join(self, agent: RankAgent, ends: queue.SimpleQueue[_End], patience: float) -> NodeConnection:
        config = self._context.config
        mine = fingerprint(config, load_plugins().manifest, rank=self._part.ranks[0])
        join = NodeJoin(place=config.nodes.node_rank, fingerprint=msgspec.structs.replace(mine, node=self.name))
        logger.info("node %s joins %s with ranks %s", self.name, self._url, list(self._part.ranks))
        return NodeConnection(
            self._url,
            secret=self._secret,
            node=self.name,
            body=msgspec.msgpack.encode(join),
            timeout=patience,
            on_message=agent.take,
            on_lost=lambda reason, planned: ends.put(_End(reason=reason)),
            stop=lambda: self._stopped,
            source=self._source,
        )
