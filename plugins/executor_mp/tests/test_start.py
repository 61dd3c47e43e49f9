"""How ranks start: as what, with what, and what is left when they cannot."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from pathlib import Path

import psutil
import pytest

from fourfold.errors import ConfigError, EngineError, ExecutorFailed, PluginError, RpcTimeout, WorkerError
from fourfold.supervision.child_process import ChildCommand, ChildSupervisor
from fourfold_executor_mp.executor import MpExecutor
from fourfold_executor_mp.plugin import _suits
from fourfold_executor_mp.rank_processes import RankProcesses

from .conftest import DEADLINE, Start, children, make_context
from .faulty_worker import FAULT


def test_a_rank_knows_its_place_and_shows_it(start: Start) -> None:
    executor = start(2, dp=2, dp_rank=1)
    assert executor.collective_rpc("local_rank") == [(1, 2), (1, 3)]
    rows = executor.processes()
    assert [(row["role"], row["label"], row["state"]) for row in rows] == [
        ("worker", "DP1.PP0.TP0", "running"),
        ("worker", "DP1.PP0.TP1", "running"),
    ]
    assert [row["pid"] for row in rows] == executor.collective_rpc("pid")
    titles = [" ".join(psutil.Process(row["pid"]).cmdline()).strip() for row in rows]
    assert titles == ["fourfold worker DP1.PP0.TP0", "fourfold worker DP1.PP0.TP1"]
    executor.shutdown()
    assert executor.processes() == []


def test_ranks_meet_in_a_store_that_leaves_nothing(start: Start) -> None:
    before = set(os.listdir("/tmp")), set(os.listdir("/dev/shm"))
    executor = start()
    assert executor.collective_rpc("meet") == [["0", "1"]] * 2
    new = set(os.listdir("/tmp")) - before[0], set(os.listdir("/dev/shm")) - before[1]
    assert not [name for names in new for name in names if "fourfold" in name or "rendezvous" in name]


def test_one_rank_needs_no_store(start: Start) -> None:
    with pytest.raises(WorkerError, match="AssertionError"):
        start(1).collective_rpc("meet")


FAULTS = {
    "raise": (WorkerError, "rank 1 failed in worker construction: ValueError: on purpose"),
    "exit": (ExecutorFailed, "rank 1 exited with code 9 during worker construction"),
    "SIGSEGV": (ExecutorFailed, "rank 1 was killed by signal 11 (SIGSEGV) during worker construction"),
    "hang": (RpcTimeout, "from rank(s) 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_cannot_start_is_one_error_and_nobody_is_left(
    fault: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setenv(FAULT, f"1:{fault}")
    kind, message = FAULTS[fault]
    with pytest.raises(kind, match=re.escape(message)):
        start(startup_timeout=3.0 if fault == "hang" else DEADLINE)
    assert children() == before


def test_a_worker_that_is_not_there_is_said(start: Start) -> None:
    with pytest.raises(WorkerError, match=r"rank \d failed in worker construction: ModuleNotFoundError"):
        start(worker="no_such_module:Worker")


@pytest.mark.parametrize("step", ["first rank", "second rank", "meeting place", "discovery"])
def test_whatever_step_fails_is_the_error_and_nothing_is_left(
    step: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads, descriptors = children(), set(threading.enumerate()), set(os.listdir("/proc/self/fd"))

    def fail(*args: object, **kwargs: object) -> None:
        raise EngineError(f"the {step} failed on purpose")

    real = ChildSupervisor.start

    def start_one(self: ChildSupervisor, command: ChildCommand, **kwargs: object) -> object:
        if command.label.endswith("TP1"):
            fail()
        return real(self, command, **kwargs)  # type: ignore[arg-type]

    match step:
        case "first rank":
            monkeypatch.setattr(ChildSupervisor, "start", fail)
        case "second rank":
            monkeypatch.setattr(ChildSupervisor, "start", start_one)
        case "meeting place":
            monkeypatch.setattr(os, "memfd_create", fail)
        case "discovery":
            monkeypatch.setattr("fourfold.rpc.rank_executor.compare_all", fail)
    with pytest.raises(EngineError, match=f"^the {step} failed on purpose$"):
        start()
    assert children() == before
    assert set(threading.enumerate()) == threads
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_rank_with_other_plugins_is_refused_by_name(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray_plugin.py").write_text('FOURFOLD_CONTRACT = ">=1.0,<2"\n')
    metadata = tmp_path / "stray_plugin-7.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stray-plugin\nVersion: 7.1\n")
    (metadata / "entry_points.txt").write_text("[fourfold]\nstray = stray_plugin\n")
    real = RankProcesses._command

    def command(self: RankProcesses, rank: int, *where: int) -> ChildCommand:
        made = real(self, rank, *where)
        path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
        return dataclasses.replace(made, environment={"PYTHONPATH": path}) if rank == 1 else made

    monkeypatch.setattr(RankProcesses, "_command", command)
    with pytest.raises(
        PluginError, match=r"rank 1 on .* has stray-plugin 7.1 as plugin 'stray', and rank 0 .* nothing"
    ):
        start()


def test_nothing_leaks_over_starts_and_stops() -> None:
    def counts() -> tuple[int, int, set[psutil.Process]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), children()

    MpExecutor(make_context()).shutdown()
    before = counts()
    for _ in range(3):
        executor = MpExecutor(make_context())
        executor.collective_rpc("make_bytes", args=(1 << 20,))
        executor.shutdown()
    assert counts() == before


def test_four_ranks_start_at_once(start: Start) -> None:
    """Each takes some 0.2 s of computing; what is waited for would add up."""
    began = time.monotonic()
    assert [rank for rank, _ in start(4).collective_rpc("who")] == [0, 1, 2, 3]
    assert time.monotonic() - began < DEADLINE


def test_reply_rank_must_be_a_rank(start: Start) -> None:
    with pytest.raises(ConfigError, match="reply_rank is 2; this executor has ranks 0 to 1"):
        start().collective_rpc("who", reply_rank=2)


def test_it_suits_several_ranks() -> None:
    assert _suits(make_context(2).config).score > _suits(make_context(1).config).score > 0
