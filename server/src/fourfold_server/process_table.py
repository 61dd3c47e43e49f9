"""Writes down which processes make up this deployment, for `/topology` and `fourfold ps`. Safe from every thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from fourfold.supervision.run_directory import ProcessState, RunDirectory, process_state

logger = logging.getLogger(__name__)


class ProcessTable:
    """The state of every process, in the run directory."""

    def __init__(self, run_directory: RunDirectory, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called after each change, on the thread of whoever made it."""
        self._run_directory = run_directory
        self._lock = threading.Lock()
        self._owned: dict[tuple[str, int | str], list[ProcessState]] = {}
        """What is shown of an engine's workers, or of a node."""
        self._on_change = on_change

    def set(self, role: str, label: str, state: str, *, pid: int | None = None, detail: str = "") -> None:
        """Show a process of this host, by default this one. One that has gone already is not shown."""
        try:
            entry = process_state(role, label, state, pid=pid, detail=detail)
        except ProcessLookupError:
            self.remove(role, label)
            return
        with self._lock:
            self._write(entry)
        self._on_change()

    def remove(self, role: str, label: str) -> None:
        """Show a process no longer."""
        with self._lock:
            self._run_directory.remove_state(role, label)
        self._on_change()

    def set_workers(self, engine: int, workers: list[dict[str, Any]]) -> None:
        """Show the worker processes of an engine, as its EngineReady names them, in place of earlier ones."""
        self._set_owned(("engine", engine), msgspec.convert(workers, list[ProcessState]))

    def set_node(self, node: str, processes: list[ProcessState]) -> None:
        """Show the processes of another node, in place of those that were shown of it."""
        self._set_owned(("node", node), processes)

    def _set_owned(self, owner: tuple[str, int | str], states: list[ProcessState]) -> None:
        with self._lock:
            for gone in self._owned.pop(owner, []):
                self._run_directory.remove_state(gone.role, gone.label)
            self._owned[owner] = states
            for state in states:
                self._write(state)
        self._on_change()

    def _write(self, state: ProcessState) -> None:
        try:
            self._run_directory.write_state(state)
        except OSError as error:  # a full disk must not end what serves
            logger.warning("`fourfold ps` cannot be told of %s %s: %s", state.role, state.label, error)
