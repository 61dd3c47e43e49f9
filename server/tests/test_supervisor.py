from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold.config.timeout_config import TimeoutConfig
from fourfold.messages import EngineReady
from fourfold.process_messages import EngineDead, EngineDraining, EngineNotice, EngineStarting, RestartEngine
from fourfold.supervision.run_directory import RunDirectory, deployments, running_processes
from fourfold.testing.ready_engine import ready_engine
from fourfold_server.config import OnFailure
from fourfold_server.process_table import ProcessTable
from fourfold_server.roles import EngineRole, Shape
from fourfold_server.supervised_process import Failure
from fourfold_server.supervisor import Supervisor

DEADLINE = 20.0


class Listener:
    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def engine_changed(self, notice: EngineNotice) -> None:
        match notice:
            case EngineStarting():
                self.events.put(("starting", notice.incarnation))
            case EngineReady():
                self.events.put(("ready", notice.incarnation))
            case EngineDraining():
                self.events.put(("draining", notice.incarnation))
            case EngineDead():
                self.events.put(("dead", notice.reason))

    def gave_up(self, failure: Failure) -> None:
        self.events.put(("gave up", failure.message, failure.status))

    def next(self) -> tuple[Any, ...]:
        return self.events.get(timeout=DEADLINE)


class Deployment:
    def __init__(
        self,
        folder: Path,
        behaviours: str,
        on_failure: OnFailure,
        *,
        startup_timeout: float,
        drain_timeout: float,
        num_engines: int,
        lockstep: bool,
    ) -> None:
        self.root = folder
        self.run_directory = RunDirectory.create(folder)
        self.run_directory.write_file("behaviours", behaviours.encode())
        self.listener = Listener()
        table = ProcessTable(self.run_directory)
        shape = Shape(
            run_directory=self.run_directory.path,
            num_engines=num_engines,
            num_api_servers=1,
            log_level="info",
            lockstep=lockstep,
        )
        self.role = engines = EngineRole(shape, table, "fake_engine")
        engines.add_listener(self.listener.engine_changed)
        self.supervisor = Supervisor(
            engines,
            [],
            table,
            gave_up=self.listener.gave_up,
            timeouts=TimeoutConfig(startup_timeout=startup_timeout, drain_timeout=drain_timeout),
            on_failure=on_failure,
        )
        self.supervisor.start()

    def close(self) -> None:
        self.supervisor.close()
        self.run_directory.close()

    def engines(self) -> list[tuple[str, int]]:
        return [
            (process.state, process.pid)
            for process in running_processes(self.run_directory.path)
            if process.role == "engine_core"
        ]


Start = Callable[..., Deployment]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made: list[Deployment] = []

    def start(
        behaviours: str,
        *,
        on_failure: OnFailure = "restart",
        startup_timeout: float = 60.0,
        drain_timeout: float = 30.0,
        num_engines: int = 1,
        lockstep: bool = False,
    ) -> Deployment:
        made.append(
            Deployment(
                tmp_path,
                behaviours,
                on_failure,
                startup_timeout=startup_timeout,
                drain_timeout=drain_timeout,
                num_engines=num_engines,
                lockstep=lockstep,
            )
        )
        return made[-1]

    yield start
    for deployment in made:
        deployment.close()


def test_an_engine_gets_ready_and_ends_when_asked(start: Start) -> None:
    deployment = start("ready")
    assert [deployment.listener.next() for _ in range(2)] == [("starting", 1), ("ready", 1)]
    ((state, pid),) = deployment.engines()
    assert state == "running"
    (shown,) = deployments(deployment.root)
    assert [(process.label, process.pid) for process in shown.processes] == [("DP0", pid)]
    deployment.supervisor.close()
    deployment.supervisor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert deployment.listener.events.empty()


@pytest.mark.parametrize(
    ("behaviour", "message", "status"),
    [
        ("refuse", "no such model", 2),
        ("break", "engine_core DP0 failed during start-up: ValueError: boom", 1),
        ("exit-9", "engine_core DP0 exited with code 9 during start-up", 1),
    ],
)
def test_a_first_start_that_fails_is_the_end(start: Start, behaviour: str, message: str, status: int) -> None:
    listener = start(behaviour).listener
    assert [listener.next() for _ in range(2)] == [("starting", 1), ("gave up", message, status)]


def test_a_start_has_a_deadline(start: Start) -> None:
    listener = start("hang", startup_timeout=0.2).listener
    assert listener.next() == ("starting", 1)
    text = "engine_core DP0 was not ready within 0.2 s (--startup-timeout)"
    assert listener.next() == ("gave up", text, 1)


def test_a_killed_engine_is_restarted(start: Start) -> None:
    deployment = start("ready")
    listener = deployment.listener
    assert [listener.next() for _ in range(2)] == [("starting", 1), ("ready", 1)]
    ((_, pid),) = deployment.engines()
    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert listener.next() == ("dead", "engine_core DP0 was killed by signal 9 (SIGKILL) while running")
    assert time.monotonic() - before < 2
    assert [listener.next() for _ in range(2)] == [("starting", 2), ("ready", 2)]
    ((state, new_pid),) = deployment.engines()
    assert state == "running"
    assert new_pid != pid


def test_the_exit_policy_ends_the_deployment(start: Start) -> None:
    listener = start("die-when-ready", on_failure="exit").listener
    reason = "engine_core DP0 was killed by signal 9 (SIGKILL) while running"
    events = [listener.next() for _ in range(4)]
    assert events == [("starting", 1), ("ready", 1), ("dead", reason), ("gave up", reason, 1)]


def test_an_engine_that_has_failed_is_dead_before_it_has_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.supervisor._ENDING_TIMEOUT", 0.5)
    deployment = start("fail-and-linger ready")
    listener = deployment.listener
    reason = "engine_core DP0 failed while running: ValueError: boom"
    assert [listener.next() for _ in range(3)] == [("starting", 1), ("ready", 1), ("dead", reason)]
    ((_, pid),) = deployment.engines()
    os.kill(pid, 0)
    assert [listener.next() for _ in range(2)] == [("starting", 2), ("ready", 2)]


def test_what_cannot_start_is_not_restarted_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 2)
    listener = start("die-when-ready exit-9").listener
    reason = "engine_core DP0 was killed by signal 9 (SIGKILL) while running"
    assert [listener.next() for _ in range(3)] == [("starting", 1), ("ready", 1), ("dead", reason)]
    failed = "engine_core DP0 exited with code 9 during start-up"
    assert [listener.next() for _ in range(4)] == [("starting", 2), ("dead", failed), ("starting", 3), ("dead", failed)]
    text = f"{failed}; it is not restarted again after 2 starts that failed"
    assert listener.next() == ("gave up", text, 1)


def test_what_starts_again_and_again_may_die_as_often(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 2)
    monkeypatch.setattr("fourfold_server.supervised_process.MAX_DELAY", 0.01)
    listener = start("die-when-ready exit-9 die-when-ready die-when-ready exit-9 die-when-ready ready").listener
    reason = "engine_core DP0 was killed by signal 9 (SIGKILL) while running"
    failed = ("dead", "engine_core DP0 exited with code 9 during start-up")
    for incarnation in range(1, 7):
        assert listener.next() == ("starting", incarnation)
        expected = [failed] if incarnation in (2, 5) else [("ready", incarnation), ("dead", reason)]
        assert [listener.next() for _ in expected] == expected
    assert [listener.next() for _ in range(2)] == [("starting", 7), ("ready", 7)]


def test_one_that_cannot_start_does_not_end_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while they are away themselves, to come back."""
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 1)
    monkeypatch.setattr("fourfold_server.supervised_process.MAX_DELAY", 0.01)
    deployment = start("ready ready-if-1", num_engines=2)
    listener = deployment.listener
    assert sorted(listener.next() for _ in range(4)) == [("ready", 1)] * 2 + [("starting", 1)] * 2
    pids = {process.label: process.pid for process in running_processes(deployment.run_directory.path)}
    os.kill(pids["DP0"], signal.SIGKILL)
    while listener.next() != ("starting", 4):
        pass
    os.kill(pids["DP1"], signal.SIGKILL)
    while (notice := listener.next()) != ("ready", 2):
        assert notice[0] != "gave up"


def test_a_start_that_failed_before_one_that_did_not_does_not_count(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 1)
    monkeypatch.setattr("fourfold_server.supervised_process.MAX_DELAY", 0.01)
    deployment = start("ready exit-9 ready", num_engines=2)
    listener = deployment.listener
    assert sorted(listener.next() for _ in range(4)) == [("ready", 1)] * 2 + [("starting", 1)] * 2
    for label in ("DP0", "DP1"):
        pids = {process.label: process.pid for process in running_processes(deployment.run_directory.path)}
        os.kill(pids[label], signal.SIGKILL)
        while (notice := listener.next()) != ("ready", 3):
            assert notice[0] != "gave up"


def test_rapid_failures_end_nothing_while_another_node_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 1)
    deployment = start("die-when-ready exit-9 exit-9 serve")
    deployment.supervisor.post(lambda: deployment.role.tell(ready_engine(1)))
    seen = [deployment.listener.next() for _ in range(10)]  # one of them is the other node's
    assert seen[-1] == ("ready", 4)


def test_an_engine_that_is_starting_is_ended_at_once(start: Start) -> None:
    deployment = start("hang")
    assert deployment.listener.next() == ("starting", 1)
    before = time.monotonic()
    deployment.supervisor.close(grace=30)
    assert time.monotonic() - before < 5


def test_a_report_that_makes_no_sense_is_the_end(start: Start) -> None:
    listener = start("babble").listener
    assert listener.next() == ("starting", 1)
    name, message, status = listener.next()
    assert (name, status) == ("gave up", 1)
    assert message.startswith("the supervisor failed: DecodeError: ")


def test_an_engine_fails_for_ever_beside_one_that_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.supervisor.MAX_FAILED_STARTS", 1)
    monkeypatch.setattr("fourfold_server.supervised_process.MAX_DELAY", 0.01)
    deployment = start("ready ready-if-1 ready-if-1 ready-if-1 ready", num_engines=2)
    listener = deployment.listener
    assert sorted(listener.next() for _ in range(4)) == [("ready", 1)] * 2 + [("starting", 1)] * 2
    victim = next(process.pid for process in running_processes(deployment.run_directory.path) if process.label == "DP0")
    os.kill(victim, signal.SIGKILL)
    assert listener.next()[0] == "dead"
    dead = ("dead", "engine_core DP0 exited with code 9 during start-up")
    for incarnation in (2, 3, 4):
        assert [listener.next(), listener.next()] == [("starting", incarnation), dead]
    assert [listener.next() for _ in range(2)] == [("starting", 5), ("ready", 5)]


@pytest.mark.parametrize("behaviour", ["exit-9", "hang"])
def test_what_fails_to_start_can_be_started_over_at_once(start: Start, behaviour: str) -> None:
    """While it waits for the next try, a minute at least, and in the middle of one."""
    deployment = start(f"ready exit-9 {behaviour} ready", num_engines=2)
    listener = deployment.listener
    assert sorted(listener.next() for _ in range(4)) == [("ready", 1)] * 2 + [("starting", 1)] * 2
    victim = next(process.pid for process in running_processes(deployment.run_directory.path) if process.label == "DP0")
    deployment.role.processes[0].rapid_crashes = 8
    os.kill(victim, signal.SIGKILL)
    dead = ("dead", "engine_core DP0 exited with code 9 during start-up")
    assert listener.next()[0] == "dead"
    deployment.supervisor.restart(RestartEngine(engine=0, now=True))
    assert [listener.next(), listener.next()] == [("starting", 2), dead]
    if behaviour == "hang":
        assert listener.next() == ("starting", 3)
        newcomer = [notice for notice in deployment.role.present_state() if notice.engine == 0]
        assert [type(notice) for notice in newcomer] == [EngineStarting, EngineDead, EngineStarting]
    else:
        assert [listener.next(), listener.next()] == [("starting", 3), dead]
    deployment.supervisor.restart(RestartEngine(engine=0, now=True))
    assert [listener.next() for _ in range(2)] == [("starting", 4), ("ready", 4)]
    newcomer = [notice for notice in deployment.role.present_state() if notice.engine == 0]
    assert isinstance(newcomer[-1], EngineReady)
    assert not deployment.role.processes[0].start_failure


def test_engines_that_share_experts_are_restarted_together_and_not_one_by_one(start: Start) -> None:
    deployment = start("ready", num_engines=2, lockstep=True)
    listener = deployment.listener
    assert sorted(listener.next() for _ in range(4)) == [("ready", 1)] * 2 + [("starting", 1)] * 2
    before = {process.label: process for process in running_processes(deployment.run_directory.path)}
    deployment.supervisor.restart(RestartEngine(engine=1))
    os.kill(before["DP0"].pid, signal.SIGKILL)
    events = sorted(listener.next() for _ in range(6))
    assert events[:2] == [
        ("dead", "engine_core DP0 was killed by signal 9 (SIGKILL) while running"),
        ("dead", "it is being restarted"),
    ]
    assert events[2:] == [("ready", 2)] * 2 + [("starting", 2)] * 2
    after = {process.label: process for process in running_processes(deployment.run_directory.path)}
    commands = [psutil.Process(process.pid).cmdline() for process in after.values()]
    meetings = [command[command.index("--meeting") + 1] for command in commands]
    assert meetings == [f"file://{deployment.run_directory.path}/meeting-2"] * 2


@pytest.mark.parametrize(("behaviour", "drain_timeout"), [("drain", 30.0), ("ready", 0.1)])
def test_a_planned_restart(start: Start, behaviour: str, drain_timeout: float) -> None:
    """By itself, or when its time is over; and under the exit policy too."""
    deployment = start(f"{behaviour} ready", on_failure="exit", drain_timeout=drain_timeout)
    listener = deployment.listener
    assert [listener.next() for _ in range(2)] == [("starting", 1), ("ready", 1)]
    deployment.supervisor.restart(RestartEngine(engine=0))
    deployment.supervisor.restart(RestartEngine(engine=0))
    assert listener.next() == ("draining", 1)
    assert listener.next() == ("dead", "it is being restarted")
    assert [listener.next() for _ in range(2)] == [("starting", 2), ("ready", 2)]
    assert listener.events.empty()
