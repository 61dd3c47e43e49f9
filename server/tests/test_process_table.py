from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from fourfold.supervision.run_directory import ProcessState, RunDirectory, deployments, process_state, running_processes
from fourfold_server.process_table import ProcessTable


def shown(directory: RunDirectory) -> list[tuple[str, str, int, str]]:
    return [(one.role, one.label, one.pid, one.state) for one in running_processes(directory.path)]


def test_the_run_directory_shows_what_runs(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        table = ProcessTable(directory)
        table.set("api_server", "", "running", detail="http://x")
        table.set("engine_core", "DP0", "starting")
        worker = msgspec.to_builtins(process_state("worker", "DP0.PP0.TP0", "running"))
        table.set_workers(0, [worker])
        assert shown(directory) == [
            ("api_server", "", os.getpid(), "running"),
            ("engine_core", "DP0", os.getpid(), "starting"),
            ("worker", "DP0.PP0.TP0", os.getpid(), "running"),
        ]
        (deployment,) = deployments(tmp_path)
        assert [process.role for process in deployment.processes] == ["api_server", "engine_core", "worker"]
        table.set_workers(0, [])
        assert [process.role for process in deployments(tmp_path)[0].processes] == ["api_server", "engine_core"]


def test_a_process_that_is_gone_is_not_shown(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        table = ProcessTable(directory)
        table.set("engine_core", "DP0", "running")
        table.set("engine_core", "DP0", "running", pid=2**22 + 1)
        assert shown(directory) == []
        table.remove("engine_core", "DP0")
        (deployment,) = deployments(tmp_path)
        assert deployment.processes == []


def test_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: ProcessState) -> None:
        raise OSError(28, "No space left on device")

    with RunDirectory.create(tmp_path) as directory:
        monkeypatch.setattr(directory, "write_state", fail)
        ProcessTable(directory).set("api_server", "", "running")
        assert shown(directory) == []
