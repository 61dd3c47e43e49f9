"""The nodes of a deployment as `/topology` shows them: a file of the run directory, for every API server.

A node that was there once is shown for good, with what has become of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import NodePlan
from fourfold.messages import EngineReady
from fourfold.nodes.addresses import listening_address, node_name
from fourfold.process_messages import EngineDead, EngineNotice
from fourfold.supervision.run_directory import RunDirectory

_FILE = "nodes.json"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: str
    role: str
    """``head``: it answers requests; ``engines``: it has replicas only; ``ranks``: it has ranks of another's engine."""
    replicas: list[int]
    """Ranks of its replicas, or of those that it has ranks of; of a lost node, those that it had."""
    state: str
    """running; lost: it has gone; restarting: an engine that it had ranks of has ended, and is started anew."""
    since: str
    """When it came into this state, as ISO 8601 writes it."""


class NodeTable:
    """Safe from every thread: nodes come and go on one, and what becomes of engines is told on another."""

    def __init__(self, run_directory: RunDirectory, own: str, replicas: Sequence[int], *, first_rank: int = 0) -> None:
        """``own`` is this node, with its replicas; ``first_rank`` is the rank of engine 0."""
        self._run_directory = run_directory
        self._own = own
        self._first_rank = first_rank
        self._lock = threading.Lock()
        self._rows: dict[str, NodeRow] = {}
        self._ranks: dict[int, set[str]] = {}
        """Replica -> the other nodes that have ranks of it, while it runs."""
        with self._lock:
            self._set(own, "head", replicas, "running")

    def join(self, node: str, replicas: Sequence[int]) -> None:
        """Show a node with replicas."""
        with self._lock:
            self._set(node, "engines", replicas, "running")

    def lose(self, node: str) -> None:
        """Show that a node has gone."""
        with self._lock:
            row = self._rows[node]
            self._set(node, row.role, row.replicas, "lost")

    def hear(self, notice: EngineNotice) -> None:
        """Hear what becomes of an engine, which may have ranks on other nodes."""
        replica = self._first_rank + notice.engine
        with self._lock:
            if isinstance(notice, EngineReady):
                self._ranks[replica] = {row["node"] for row in notice.workers if row.get("node")} - {self._own}
            elif isinstance(notice, EngineDead):
                self._ranks.pop(replica, None)
            else:
                return
            for node in dict.fromkeys([*self._rows, *sorted(self._ranks.get(replica, ()))]):
                self._show_ranks(node)

    def _show_ranks(self, node: str) -> None:
        row = self._rows.get(node)
        if row is not None and row.role != "ranks":
            return
        replicas = sorted(replica for replica, nodes in self._ranks.items() if node in nodes)
        if replicas or row is None:
            self._set(node, "ranks", replicas, "running")
        else:
            whole = all(replica in self._ranks for replica in row.replicas)
            self._set(node, "ranks", row.replicas, "lost" if whole else "restarting")

    def _set(self, node: str, role: str, replicas: Sequence[int], state: str) -> None:
        old = self._rows.get(node)
        since = old.since if old is not None and old.state == state else _now()
        self._rows[node] = NodeRow(node=node, role=role, replicas=list(replicas), state=state, since=since)
        self._run_directory.write_file(_FILE, msgspec.json.encode(list(self._rows.values())))


def open_node_table(run_directory: RunDirectory, config: EngineConfig, plan: NodePlan) -> NodeTable:
    """With the node that answers requests, which is this one."""
    nodes = config.nodes
    name = os.uname().nodename
    if nodes.nnodes > 1:
        name = node_name(listening_address(nodes.master_address, nodes.node_interface, option="--master-address"))
    elif plan.elsewhere:
        own = listening_address(nodes.data_parallel_address, nodes.node_interface, option="--data-parallel-address")
        name = node_name(own)
    replicas = [plan.first_rank + engine for engine in plan.local]
    return NodeTable(run_directory, name, replicas, first_rank=plan.first_rank)


def read_nodes(run_directory: Path) -> list[NodeRow]:
    """The nodes, this one first."""
    try:
        return msgspec.json.decode((run_directory / _FILE).read_bytes(), type=list[NodeRow])
    except FileNotFoundError:  # while the deployment starts, or ends
        return []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
