"""The failure model: what goes wrong is told to everyone, with its cause, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fourfold.supervision.run_directory import deployments
from fourfold.testing.processes import still_runs

from .conftest import ONE_THREAD, Start
from .running_server import START_TIMEOUT, Server, Stream, wait_until
from .test_lifecycle import LONG, assert_port_is_free, port_of

PROMPTLY = 2.0
"""Seconds within which clients hear of a failure."""
GONE = 5.0
"""Seconds within which nothing is left."""
TWO_RANKS = ("--executor", "faults", "--tensor-parallel-size", "2", "--on-failure", "exit")

Inject = Callable[..., Server]


@pytest.fixture
def inject(start: Start, faults: Path) -> Inject:
    """Starts a server of two ranks with faults."""

    def inject(*faults_given: str, options: tuple[str, ...] = (), ready: bool = True) -> Server:
        path = os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "FAULTS": ",".join(faults_given)}
        return start(*TWO_RANKS, *options, ready=ready, environment=environment)

    return inject


def everything_of(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.descendants()]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    def alive() -> list[psutil.Process]:
        return [one for one in processes if still_runs(one)]

    wait_until(lambda: not alive(), GONE, f"the end of {processes}")


def assert_nothing_is_left(server: Server, processes: list[psutil.Process], port: int, memory: set[str]) -> None:
    wait_until_gone(processes)
    strays = [one for one in psutil.process_iter() if group_of(one) == server.process.pid and still_runs(one)]
    assert not strays
    assert_port_is_free(port)
    assert set(os.listdir("/dev/shm")) <= memory
    # A killed process counts as gone while threads of it still hold its sockets.
    wait_until(lambda: str(server.root) not in Path("/proc/net/unix").read_text(), GONE, "no socket of it")


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


@pytest.fixture
def memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


# --- an error on a rank ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, marks=pytest.mark.long), 1],  # rank 1 never replies to a step
)
def test_an_exception_on_any_rank_reaches_every_client_with_its_place(inject: Inject, rank: int) -> None:
    server = inject(f"{rank}:execute_model:40:raise")
    processes = everything_of(server)
    streams = [Stream(server, "/v1/completions", LONG) for _ in range(2)]
    with server.client() as client:
        whole = client.post("/v1/completions", json=LONG)  # until the fault
    for stream in streams:
        stream.join(PROMPTLY)
    cause = (
        rf"rank {rank} failed in execute_model: RuntimeError: a fault on purpose \(points.py, line \d+, in _happen\)"
    )
    assert whole.status_code == 503
    for error in (whole.json()["error"], *(stream.error for stream in streams)):
        assert error is not None
        assert error["type"] == "server_error"
        assert re.search(cause, error["message"]), error
    assert server.wait(GONE) == 1
    assert re.fullmatch(f"Error: engine_core DP0 failed while running: WorkerError: {cause}", server.lines[-1])
    assert re.search(r'File ".*points.py", line \d+, in wrapped', server.log), server.log
    wait_until_gone(processes)


STARTS = {
    "construction": "rank 1 failed in worker construction: RuntimeError: a fault on purpose",
    "load": "rank 1 failed in load: RuntimeError: a fault on purpose",
    "initialize_cache": "rank 1 failed in initialize_cache: RuntimeError: a fault on purpose",
    "warm_up": "rank 1 failed in warm_up: RuntimeError: a fault on purpose",
}


@pytest.mark.parametrize(
    "point", [one if one == "load" else pytest.param(one, marks=pytest.mark.long) for one in STARTS]
)
def test_a_start_that_fails_ends_with_its_cause(inject: Inject, memory: set[str], point: str) -> None:
    server = inject(f"1:{point}:0:raise", ready=False)
    processes = everything_of(server)
    assert server.wait(60) == 1
    text = f"Error: engine_core DP0 failed during start-up: WorkerError: {STARTS[point]} (points.py, line "
    assert server.lines[-1].startswith(text), server.lines[-1]
    wait_until_gone(processes)
    assert set(os.listdir("/dev/shm")) <= memory
    assert list(server.root.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("what", ["exit", "kill"])
def test_a_start_that_loses_a_rank_names_it(inject: Inject, what: str) -> None:
    server = inject(f"0:warm_up:0:{what}", ready=False)
    assert server.wait(60) == 1
    how = {"exit": "exited with code 9", "kill": "was killed by signal 9 (SIGKILL)"}[what]
    assert f"rank 0 {how} during warm_up" in server.lines[-1]


def test_a_rank_that_stands_still_is_named(inject: Inject) -> None:
    server = inject("1:execute_model:4:stop", options=("--stall-timeout", "2"))
    processes = everything_of(server)
    stream = Stream(server, "/v1/completions", LONG)
    stream.wait_for_events(1)
    stream.join(2 + 2 * PROMPTLY)
    assert stream.error is not None
    # Either the rank that waits for it or the executor that watches it is first.
    assert re.search(r"from rank\(s\) 1\b|rank 1 was stopped by a signal for 2 s", stream.error["message"])
    assert server.wait(GONE) == 1
    wait_until_gone(processes)


def test_ranks_that_diverge_are_told_where(inject: Inject) -> None:
    server = inject("1:collective.all_reduce:7:drop", options=("--debug-collectives", "--stall-timeout", "10"))
    stream = Stream(server, "/v1/completions", LONG)
    stream.join(10)
    assert stream.error is not None
    found = re.search(
        r"collective \d+ of group tp differs: rank (\d) runs (.*) in step 1, rank (\d) runs (.*) in step 1",
        stream.error["message"],
    )
    assert found, stream.error
    assert {found[1], found[3]} == {"0", "1"}
    assert "all_reduce float32" in found[2] + found[4]


# --- communicators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("1:comm.all_reduce:2:corrupt", r"rank 1: all_reduce of .* gave wrong data"),
        (
            "1:comm.all_reduce:2:delay=90",
            r"rank \d: it did not finish its self-test within 2 s \(--self-test-timeout\)",
        ),
    ],
)
def test_a_communicator_that_lies_or_hangs_is_passed_over(inject: Inject, fault: str, reason: str) -> None:
    server = inject(fault, options=("--self-test-timeout", "2"))
    (line,) = [line for line in server.lines if "TP0" in line and "cannot be used for group tp" in line]
    assert re.search(f"communicator 'faulty' cannot be used for group tp, taking the next one: {reason}", line), line
    assert any("communicator 'shm'" in line for line in server.lines)
    with server.client() as client:
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("0:comm.build:0:raise", "rank 0: RuntimeError: a fault on purpose"),
        ("1:comm.broadcast:0:raise", "rank 1: RuntimeError: a fault on purpose"),
        ("1:comm.all_gather:3:corrupt", "rank 1: all_gather of"),
        ("0:comm.all_reduce:1:delay=90", "rank 0: it did not finish its self-test within 10 s"),
    ],
)
def test_a_communicator_that_was_asked_for_is_refused_with_its_fault(inject: Inject, fault: str, text: str) -> None:
    server = inject(fault, options=("--comm", "faulty"), ready=False)
    assert server.wait(60) == 2
    assert f"communicator 'faulty' cannot be used for group tp: {text}" in server.lines[-1]


# --- death at any moment ---------------------------------------------------------------------------------------------

MOMENTS = ("loading", "idle", "generating")
VICTIMS = ("server", "engine", "TP0", "TP1")
QUICK = {("engine", "generating"), ("server", "loading")}


def pid_of(server: Server, victim: str) -> int:
    if victim == "server":
        return server.process.pid

    def find() -> int | None:
        titles = {child.pid: " ".join(child.cmdline()).strip() for child in server.descendants()}
        ending = "engine_core DP0" if victim == "engine" else victim
        return next((pid for pid, title in titles.items() if title.endswith(ending)), None)

    pid: int = wait_until(find, 30, victim)
    return pid


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(victim, moment, marks=() if (victim, moment) in QUICK else pytest.mark.long)
        for victim in VICTIMS
        for moment in MOMENTS
    ],
)
def test_a_killed_process_takes_everything_with_it(inject: Inject, memory: set[str], victim: str, moment: str) -> None:
    if moment == "loading":
        server = inject("*:loaded:0:delay=60", ready=False)
        pid_of(server, "TP1")
    else:
        server = inject()
    stream = None
    if moment == "generating":
        stream = Stream(server, "/v1/completions", LONG)
        stream.wait_for_events(2)
    pid, processes, port = pid_of(server, victim), everything_of(server), port_of(server)
    os.kill(pid, signal.SIGKILL)
    assert_nothing_is_left(server, processes, port, memory)
    status = server.wait(GONE)
    if victim == "server":
        assert status == -signal.SIGKILL
    else:
        assert status == 1
        assert "was killed by signal 9 (SIGKILL)" in server.lines[-1]
        assert list(server.root.iterdir()) == []
    if stream is not None:
        stream.join(PROMPTLY)


def test_what_stands_still_goes_with_the_server_too(inject: Inject, memory: set[str]) -> None:
    server = inject()
    stream = Stream(server, "/v1/completions", LONG)
    stream.wait_for_events(2)
    processes, port = everything_of(server), port_of(server)
    for victim in ("TP0", "engine", "server"):
        os.kill(pid_of(server, victim), signal.SIGSTOP)
    os.kill(server.process.pid, signal.SIGKILL)
    assert_nothing_is_left(server, processes, port, memory)
    stream.join(PROMPTLY)


def test_a_rank_that_is_lost_in_a_drain_ends_it(inject: Inject, memory: set[str]) -> None:
    server = inject()
    stream = Stream(server, "/v1/completions", LONG)
    stream.wait_for_events(2)
    processes, port = everything_of(server), port_of(server)
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.status("/readyz") == 503, PROMPTLY, "/readyz is 503")
    os.kill(pid_of(server, "TP1"), signal.SIGKILL)
    stream.join(PROMPTLY)
    assert stream.error is not None
    assert "rank 1 was killed by signal 9 (SIGKILL) during execute_model" in stream.error["message"]
    assert server.wait(GONE) == 1
    assert_nothing_is_left(server, processes, port, memory)
    assert list(server.root.iterdir()) == []


def test_a_clean_exit_leaves_nothing(inject: Inject, memory: set[str]) -> None:
    server = inject()
    stream = Stream(server, "/v1/completions", {**LONG, "max_tokens": 20})
    processes, port = everything_of(server), port_of(server)
    stream.wait_for_events(1)
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    stream.join(PROMPTLY)
    assert stream.done
    assert_nothing_is_left(server, processes, port, memory)
    assert list(server.root.iterdir()) == []


# --- many at once ----------------------------------------------------------------------------------------------------


def shown(root: Path) -> list[dict[str, Any]]:
    """What `fourfold ps` shows of all deployments."""
    command = [sys.executable, "-m", "fourfold_server.cli", "ps", "--json"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(root)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_deployments_that_start_at_once_do_not_meet(
    tiny_model: Path, tmp_path: Path, memory: set[str], rounds: int
) -> None:
    count = 8
    options = ["--load-format", "dummy", "--dtype", "float32", "--served-model-name", "tiny"]
    options += ["--tensor-parallel-size", "2", "--executor", "mp", "--seed"]
    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        servers = [Server([str(tiny_model), *options, str(n)], tmp_path, **ONE_THREAD) for n in range(count)]
        try:
            urls: set[str] = set()
            while len(urls) < count:
                # Read in this process: a command a look would take more of the cores than the deployments.
                rows = [row for deployment in deployments(servers[0].root) for row in deployment.processes]
                urls = {row.detail for row in rows if (row.role, row.state) == ("api_server", "running")}
                assert time.monotonic() < began + START_TIMEOUT
                assert [server.process.poll() for server in servers] == [None] * count
                threading.Event().wait(0.1)
            seconds.append(round(time.monotonic() - began, 1))
            assert len([row for row in rows if row.role == "worker"]) == 2 * count
            for url in urls:
                answer = httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3}, verify=False, timeout=60)
                assert answer.status_code == 200
            shown_pids = {row["pid"] for one in shown(tmp_path) for row in one["processes"]}
            assert shown_pids == {process.pid for server in servers for process in everything_of(server)}
            for server in servers:
                server.signal(signal.SIGTERM)
            assert [server.wait(30) for server in servers] == [0] * count
        finally:
            for server in servers:
                server.kill()
    print("seconds until all were ready:", seconds)
    assert set(os.listdir("/dev/shm")) <= memory
