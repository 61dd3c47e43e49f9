from __future__ import annotations

import os
from pathlib import Path

import pytest

from fourfold.config.parallel_config import ParallelConfig
from fourfold.supervision.run_directory import RunDirectory, deployments
from fourfold_server.process_table import ProcessTable


def test_topology_and_run_directory_agree(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        table = ProcessTable(directory, ParallelConfig())
        table.set("api_server", "", "running", detail="http://x")
        table.set("engine_core", "DP0", "starting")
        worker = {"role": "worker", "label": "DP0.PP0.TP0", "pid": 1, "host": "h", "state": "running", "start_time": 1}
        table.set_workers(0, [worker])
        topology = table.topology()
        assert [(p["role"], p["label"], p["pid"], p["state"]) for p in topology["processes"]] == [
            ("api_server", "", os.getpid(), "running"),
            ("engine_core", "DP0", os.getpid(), "starting"),
            ("worker", "DP0.PP0.TP0", 1, "running"),
        ]
        assert topology["groups"] == {"tp": [[0]], "pp": [[0]], "dp": [[0]], "ep": [[0]]}
        assert topology["replicas"] == [{"label": "DP0", "state": "starting"}]
        (deployment,) = deployments(tmp_path)
        assert [process.role for process in deployment.processes] == ["api_server", "engine_core", "worker"]
        table.set_workers(0, [])
        assert [process["role"] for process in table.topology()["processes"]] == ["api_server", "engine_core"]
        assert [process.role for process in deployments(tmp_path)[0].processes] == ["api_server", "engine_core"]


def test_a_process_that_is_gone_is_not_shown(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        table = ProcessTable(directory, ParallelConfig())
        table.set("engine_core", "DP0", "running")
        table.set("engine_core", "DP0", "running", pid=2**22 + 1)
        assert table.topology()["processes"] == []
        table.remove("engine_core", "DP0")
        (deployment,) = deployments(tmp_path)
        assert deployment.processes == []


def test_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: object) -> None:
        raise OSError(28, "No space left on device")

    with RunDirectory.create(tmp_path) as directory:
        monkeypatch.setattr(directory, "write_state", fail)
        table = ProcessTable(directory, ParallelConfig())
        table.set("api_server", "", "running")
        assert [process["state"] for process in table.topology()["processes"]] == ["running"]
