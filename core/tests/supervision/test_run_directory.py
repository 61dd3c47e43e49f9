from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fourfold.errors import ConfigError
from fourfold.supervision.run_directory import (
    ProcessState,
    RunDirectory,
    deployments,
    is_running,
    process_state,
    root_directory,
)

HOLDER = """
import sys, pathlib
from fourfold.supervision.run_directory import RunDirectory, process_state
directory = RunDirectory.create(pathlib.Path(sys.argv[1]))
directory.write_state(process_state("api_server", "", "running"))
print(directory.path.name, flush=True)
sys.stdin.read()
"""


def hold(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_is_private_and_removed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "root") as directory:
        for path in (directory.path, directory.path.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        directory.write_file("config.json", b"{}")
        assert [path.name for path in directory.path.iterdir()] == ["config.json"]
    assert list((tmp_path / "root").iterdir()) == []
    directory.close()


def test_a_full_disk_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.parent == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match=r"run directory .*: No space left on device; set XDG_RUNTIME_DIR"):
        RunDirectory.create(tmp_path)


def test_a_root_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with RunDirectory.create(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_root_that_is_a_link_or_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a directory of this user's"):
        RunDirectory.create(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ConfigError, match="is not a directory of this user's"):
        RunDirectory.create(tmp_path / "real")


def test_a_living_owner_keeps_its_folder_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        with RunDirectory.create(tmp_path) as mine:
            found = {deployment.name: deployment.processes for deployment in deployments(tmp_path)}
            assert set(found) == {name, mine.path.name}
            assert [state.pid for state in found[name]] == [holder.pid]
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    assert (tmp_path / name).exists()
    assert deployments(tmp_path) == []
    with RunDirectory.create(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine.path]


def test_many_starts_and_sweeps_at_once_lose_nothing(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def start(_: int) -> RunDirectory:
        barrier.wait(10)
        return RunDirectory.create(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            directories = list(pool.map(start, range(8)))
            assert all(directory.path.is_dir() for directory in directories)
            assert len({directory.path for directory in directories}) == 8
            for directory in directories:
                directory.close()


def test_states_are_replaced_removed_and_filtered(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        directory.write_state(process_state("engine_core", "DP0", "starting"))
        directory.write_state(process_state("engine_core", "DP0", "running", detail="12 blocks"))
        directory.write_state(process_state("api_server", "", "running"))
        gone = msgspec.structs.replace(process_state("engine_core", "DP1", "running"), start_time=1)
        directory.write_state(gone)
        directory.write_file("of-another-version.state", b'{"role": 1}')
        (deployment,) = deployments(tmp_path)
        assert [(s.role, s.label, s.state, s.detail) for s in deployment.processes] == [
            ("api_server", "", "running", ""),
            ("engine_core", "DP0", "running", "12 blocks"),
        ]
        directory.remove_state("engine_core", "DP0")
        directory.remove_state("engine_core", "DP0")
        (deployment,) = deployments(tmp_path)
        assert [s.role for s in deployment.processes] == ["api_server"]


def test_a_recycled_pid_is_not_the_same_process() -> None:
    mine = process_state("worker", "DP0.PP0.TP0", "running")
    assert is_running(mine)
    assert not is_running(msgspec.structs.replace(mine, start_time=mine.start_time - 1))
    assert not is_running(msgspec.structs.replace(mine, pid=2**22 + 1))
    assert is_running(msgspec.structs.replace(mine, pid=2**22 + 1, host="elsewhere"))
    with pytest.raises(ProcessLookupError, match="no process 4194305"):
        process_state("worker", "", "running", pid=2**22 + 1)


def test_no_root_yet_means_no_deployments(tmp_path: Path) -> None:
    assert deployments(tmp_path / "missing") == []


def test_root_keeps_socket_paths_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = tmp_path / "run", tmp_path / ("x" * 100)
    for folder in (short, long):
        folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert root_directory() == short / "fourfold"
    for value in (str(long), str(tmp_path / "missing"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert root_directory() == Path(f"/tmp/fourfold-{os.getuid()}")


def test_state_survives_the_wire() -> None:
    state = process_state("worker", "DP0.PP0.TP0", "running")
    assert msgspec.json.decode(msgspec.json.encode(state), type=ProcessState) == state
