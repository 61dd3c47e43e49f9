"""Which processes make up this deployment, for `/topology` and `fourfold ps`. Safe from every thread."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec

from fourfold.config.parallel_config import ParallelConfig
from fourfold.supervision.run_directory import ProcessState, RunDirectory, process_state

logger = logging.getLogger(__name__)


class ProcessTable:
    """The state of every process, mirrored in the run directory."""

    def __init__(self, run_directory: RunDirectory, parallel: ParallelConfig) -> None:
        self._run_directory = run_directory
        self._parallel = parallel
        self._lock = threading.Lock()
        self._states: dict[tuple[str, str], ProcessState] = {}
        self._workers: dict[int, list[ProcessState]] = {}

    def set(self, role: str, label: str, state: str, *, pid: int | None = None, detail: str = "") -> None:
        """Show a process of this host, by default this one. One that has gone already is not shown."""
        try:
            entry = process_state(role, label, state, pid=pid, detail=detail)
        except ProcessLookupError:
            self.remove(role, label)
            return
        with self._lock:
            self._states[role, label] = entry
            self._write(entry)

    def remove(self, role: str, label: str) -> None:
        """Show a process no longer."""
        with self._lock:
            self._states.pop((role, label), None)
            self._run_directory.remove_state(role, label)

    def set_workers(self, engine: int, workers: list[dict[str, Any]]) -> None:
        """Show the worker processes of an engine, as its EngineReady names them, in place of earlier ones."""
        states = msgspec.convert(workers, list[ProcessState])
        with self._lock:
            for gone in self._workers.pop(engine, []):
                self._run_directory.remove_state(gone.role, gone.label)
            self._workers[engine] = states
            for state in states:
                self._write(state)

    def topology(self) -> dict[str, Any]:
        """Processes, rank groups and replicas, as JSON-able values."""
        with self._lock:
            states = sorted(self._states.values(), key=lambda state: (state.role, state.label))
            workers = [worker for engine in sorted(self._workers) for worker in self._workers[engine]]
        layout = self._parallel.layout
        return {
            "processes": [_without_start_time(state) for state in [*states, *workers]],
            "groups": {
                "tp": layout.tp_groups(),
                "pp": layout.pp_groups(),
                "dp": layout.dp_groups(),
                "ep": layout.ep_groups(),
            },
            "replicas": [
                {"label": state.label, "state": state.state} for state in states if state.role == "engine_core"
            ],
        }

    def _write(self, state: ProcessState) -> None:
        try:
            self._run_directory.write_state(state)
        except OSError as error:  # a full disk must not end what serves
            logger.warning("`fourfold ps` cannot be told of %s %s: %s", state.role, state.label, error)


def _without_start_time(state: ProcessState) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(state)
    del shown["start_time"]
    return shown
