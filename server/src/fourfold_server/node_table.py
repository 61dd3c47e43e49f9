"""The nodes of a deployment as `/topology` shows them: a file of the run directory, for every API server."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from fourfold.supervision.run_directory import RunDirectory

_FILE = "nodes.json"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: str
    role: str
    """``head``: it answers requests; ``engines``: it has replicas only; ``ranks``: it has ranks of another's engine."""
    replicas: list[int]
    """Ranks of its replicas."""
    state: str


class NodeTable:
    """Safe from every thread."""

    def __init__(self, run_directory: RunDirectory, own: NodeRow) -> None:
        self._run_directory = run_directory
        self._lock = threading.Lock()
        self._rows = {own.node: own}
        self._write()

    def set(self, row: NodeRow) -> None:
        """Show a node, in place of an earlier row of it."""
        with self._lock:
            self._rows[row.node] = row
            self._write()

    def remove(self, node: str) -> None:
        """Show a node no longer."""
        with self._lock:
            self._rows.pop(node, None)
            self._write()

    def _write(self) -> None:
        self._run_directory.write_file(_FILE, msgspec.json.encode(list(self._rows.values())))


def read_nodes(run_directory: Path) -> list[NodeRow]:
    """The nodes, this one first."""
    try:
        return msgspec.json.decode((run_directory / _FILE).read_bytes(), type=list[NodeRow])
    except FileNotFoundError:  # while the deployment starts, or ends
        return []
