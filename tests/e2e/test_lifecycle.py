"""How a deployment starts, drains, fails and ends, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fourfold.supervision.run_directory import RunDirectory
from fourfold.testing.processes import still_runs

from .conftest import Start
from .running_server import Server, Stream, wait_until

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
"""Runs for many seconds."""


def completion(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {**LONG, "max_tokens": max_tokens, **more}


def stream(server: Server, body: dict[str, Any], *, until: int = 1) -> Stream:
    """A stream with ``until`` events behind it."""
    opened = Stream(server, "/v1/completions", body)
    opened.wait_for_events(until)
    return opened


def running(server: Server) -> int:
    engine = server.health()
    count: int = engine["running"] + engine["waiting"]
    return count


def wait_until_gone(processes: list[psutil.Process], timeout: float = 5.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    alive = [process for process in alive if still_runs(process)]
    assert not alive, f"left over: {alive}"


def port_of(server: Server) -> int:
    port = httpx.URL(server.url).port
    assert port is not None
    return port


def assert_port_is_free(port: int) -> None:
    """At once, or a moment later: a killed process counts as gone while threads of it still hold its sockets."""

    def is_free() -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    wait_until(is_free, 5, f"port {port} is free")


# --- start -----------------------------------------------------------------------------------------------------------


def test_two_processes_and_nothing_beside_them(start: Start) -> None:
    server = start()
    (engine,) = server.descendants()
    assert engine.pid == server.engine_pid
    titles = [" ".join(psutil.Process(pid).cmdline()).strip() for pid in (server.process.pid, engine.pid)]
    assert titles == ["fourfold api_server", "fourfold engine_core DP0"]
    with server.client() as client:
        topology = client.get("/topology").json()
    shown = {(process["role"], process["label"], process["pid"]) for process in topology["processes"]}
    assert shown == {("api_server", "", server.process.pid), ("engine_core", "DP0", engine.pid)}
    assert topology["replicas"] == [{"rank": 0, "label": "DP0", "state": "running", "incarnation": 1}]


def test_the_api_process_has_no_torch(start: Start) -> None:
    server = start()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_probes_answer_while_the_engine_loads(start: Start) -> None:
    server = start(ready=False)
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        with server.client() as client:
            assert client.get("/livez").status_code == 200
            assert client.get("/readyz").status_code == 503
            reply = client.post("/v1/completions", json=completion(1))
            assert reply.status_code == 503
            assert "retry-after" in reply.headers
            assert reply.json()["error"]["message"]
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    server.wait_until_ready()
    assert server.status("/readyz") == 200


def test_an_idle_deployment_costs_nothing(start: Start) -> None:
    server = start()
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid)]

    def seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    threading.Event().wait(0.5)  # what the start left to do
    before = seconds()
    threading.Event().wait(2.0)
    assert seconds() - before <= 0.02 * 2.0 + 0.02  # the clock ticks in steps of 0.01 s


def test_a_port_in_use_is_refused_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start("--port", str(port), ready=False)
        assert server.wait(60) == 2
    assert server.lines[-1].startswith(f"Error: cannot listen on 127.0.0.1:{port}: address already in use")
    assert not any("engine_core" in line for line in server.lines)


def test_a_model_that_cannot_be_loaded_is_one_error(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    server = start(model=broken, load_format="safetensors", ready=False)
    assert server.wait(120) == 2
    assert server.lines[-1].startswith("Error: ")
    assert "model.safetensors" in server.lines[-1]
    assert server.states() == {}


def test_the_api_key_guards_all_but_the_probes(start: Start) -> None:
    server = start("--api-key", "secret")
    for path in ("/livez", "/readyz", "/health"):
        assert server.status(path) == 200
    assert server.status("/v1/models") == 401
    server.api_key = "secret"
    assert server.status("/v1/models") == 200
    assert "secret" not in server.log
    assert "secret" not in " ".join(psutil.Process(server.process.pid).cmdline())
    assert "secret" not in json.dumps(server.states())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls(start: Start, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    server = start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=server.url, verify=context) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    wrong = start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate), ready=False)
    assert wrong.wait(60) == 2
    assert "do not go together" in wrong.lines[-1]


# --- disconnect ----------------------------------------------------------------------------------------------------


def test_a_client_that_hangs_up_frees_its_request(start: Start) -> None:
    server = start("--max-num-seqs", "1")
    first = stream(server, LONG, until=3)
    queued = Stream(server, "/v1/completions", LONG)
    wait_until(lambda: running(server) == 2, 10, "one running, one queued")
    first.close()
    queued.wait_for_events(3)
    queued.close()
    wait_until(lambda: running(server) == 0, 2, "nothing running")
    steps = server.health()["steps"]
    threading.Event().wait(0.3)
    assert server.health()["steps"] == steps


def test_many_hang_ups_leave_nothing_behind(start: Start) -> None:
    server = start()
    for _ in range(10):
        streams = [stream(server, completion(8000, n=2)) for _ in range(3)]
        for opened in streams:
            opened.close()
    wait_until(lambda: running(server) == 0, 5, "nothing running")
    with server.client() as client:
        assert client.post("/v1/completions", json=completion(3)).status_code == 200


def test_health_tells_a_stalled_engine_from_an_idle_one(start: Start) -> None:
    server = start("--stall-timeout", "1")
    engine = server.engine_pid
    threading.Event().wait(1.2)
    assert server.status("/health") == 200
    opened = stream(server, LONG)
    assert server.status("/health") == 200
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: server.status("/health") == 503, 10, "/health is 503")
    assert server.status("/livez") == 200
    opened.join(10)
    assert opened.error is not None
    assert "was stopped by a signal for 1 s" in opened.error["message"]
    wait_until(lambda: server.status("/health") == 200, 60, "/health is 200 again")
    assert server.engine_pid != engine


# --- drain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains(start: Start, signum: signal.Signals) -> None:
    server = start("--max-num-seqs", "4", "--drain-timeout", "120")
    options = {"stream_options": {"include_usage": True}}
    streams = [stream(server, completion(1000, **options)) for _ in range(4)]
    streams += [Stream(server, "/v1/completions", completion(5, **options)) for _ in range(2)]
    wait_until(lambda: running(server) == 6, 10, "four running, two queued")
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    with server.client() as client:
        server.signal(signum, group=True)  # as Ctrl-C does: the engine gets it too
        before = time.monotonic()
        wait_until(lambda: client.get("/readyz").status_code == 503, 5, "/readyz is 503")
        assert time.monotonic() - before < 0.5
        reply = client.post("/v1/completions", json=completion(1))
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert client.get("/livez").status_code == 200
    for opened in streams:
        opened.join(120)
    assert [opened.done for opened in streams] == [True] * 6
    assert [opened.events[-1]["usage"]["completion_tokens"] for opened in streams] == [1000] * 4 + [5] * 2
    assert server.wait(20) == 0
    wait_until_gone(processes, 1)
    assert list(server.root.iterdir()) == []


def test_an_interrupt_ends_a_server_that_a_script_put_in_the_background(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control does for what runs behind &
    try:
        server = start()
    finally:
        signal.signal(signal.SIGINT, before)
    server.signal(signal.SIGINT)
    assert server.wait(20) == 0


def test_a_drain_has_a_deadline(start: Start) -> None:
    server = start("--drain-timeout", "0.5")
    running = stream(server, LONG)
    server.signal(signal.SIGTERM)
    running.join(15)
    assert running.error is not None
    assert "shutting down" in running.error["message"]
    assert server.wait(15) == 0


def test_a_second_signal_does_not_wait(start: Start) -> None:
    server = start()
    running = stream(server, LONG)
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.status("/readyz") == 503, 5, "/readyz is 503")
    before = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 1
    assert time.monotonic() - before < 2
    running.join(10)
    wait_until_gone(processes, 1)
    assert list(server.root.iterdir()) == []
    assert "a second signal ends them now" in server.log
    assert "Traceback" not in server.log


def test_a_signal_during_the_start_ends_it(start: Start) -> None:
    server = start(ready=False)
    processes = [psutil.Process(server.engine_pid)]
    assert_ends_soon(server, signal.SIGTERM)
    wait_until_gone(processes, 1)
    assert list(server.root.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_ends_it(start: Start, signum: signal.Signals) -> None:
    for seconds in (0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.2, 1.6, 2.4, 3.2):
        server = start("--data-parallel-size", "2", "--num-blocks", "600", ready=False)
        wait_until(lambda root=server.root: any(root.glob("*")), 60, "the run directory")
        threading.Event().wait(seconds)
        processes = server.descendants()
        assert_ends_soon(server, signum)
        wait_until_gone(processes, 1)
        assert list(server.root.iterdir()) == []


def test_two_signals_during_the_start_end_it_too(start: Start) -> None:
    server = start("--data-parallel-size", "2", "--num-blocks", "600", ready=False)
    processes = [psutil.Process(server.engine_pid)]
    server.signal(signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        server.signal(signal.SIGTERM)
    assert server.wait(10) in (0, 1)
    wait_until_gone(processes, 1)
    assert "Traceback" not in server.log


def assert_ends_soon(server: Server, signum: signal.Signals) -> None:
    before = time.monotonic()
    server.signal(signum)
    assert server.wait(10) == 0, server.log
    assert time.monotonic() - before < 2.5
    assert "Traceback" not in server.log


# --- failure ---------------------------------------------------------------------------------------------------------


def test_a_dead_engine_fails_its_requests_and_is_restarted(start: Start) -> None:
    server = start()
    streams = [stream(server, LONG) for _ in range(2)]
    engine = server.engine_pid
    before = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for opened in streams:
        opened.join(10)
        assert opened.error is not None
        assert opened.error["type"] == "server_error"
    assert time.monotonic() - before < 3
    wait_until(lambda: server.status("/readyz") == 503 or server.engine_pid != engine, 2, "not ready")
    wait_until(lambda: server.status("/readyz") == 200, 120, "ready again")
    assert server.engine_pid != engine
    with server.client() as client:
        assert client.post("/v1/completions", json=completion(3)).status_code == 200
    assert any("was killed by signal 9 (SIGKILL) while running; restarting it" in line for line in server.lines)


def test_the_exit_policy_leaves_nothing(start: Start) -> None:
    server = start("--on-failure", "exit")
    opened = stream(server, LONG)
    port, processes = port_of(server), [psutil.Process(server.process.pid), *server.descendants()]
    os.kill(server.engine_pid, signal.SIGKILL)
    opened.join(10)
    assert opened.error is not None
    assert server.wait(10) == 1
    assert server.lines[-1] == "Error: engine_core DP0 was killed by signal 9 (SIGKILL) while running"
    wait_until_gone(processes, 1)
    assert_port_is_free(port)
    assert list(server.root.iterdir()) == []


@pytest.mark.long
def test_a_port_is_taken_over_again_and_again(start: Start) -> None:
    """Killed or ended, a deployment leaves nothing that could hurt the next one on its port."""
    first = start()
    port = port_of(first)
    first.signal(signal.SIGKILL)
    first.wait(10)
    for ending in [signal.SIGKILL, signal.SIGTERM] * 3:
        server = start("--port", str(port))
        with server.client() as client:
            for _ in range(50):
                assert client.post("/v1/completions", json=completion(2)).status_code == 200
        server.signal(ending)
        assert server.wait(20) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)


@pytest.mark.parametrize("moment", ["load", "idle", "generation"])
def test_a_killed_server_takes_everything_with_it(start: Start, moment: str) -> None:
    memory = set(os.listdir("/dev/shm"))
    server = start(ready=moment != "load")
    opened = stream(server, LONG) if moment == "generation" else None
    port = port_of(server)
    engine = server.engine_pid
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    assert engine in {process.pid for process in processes}
    server.signal(signal.SIGKILL)
    wait_until_gone(processes, 5)
    server.wait(10)
    assert_port_is_free(port)
    assert set(os.listdir("/dev/shm")) <= memory
    if opened is not None:
        opened.join(10)
    # The next start sweeps what is left, a folder without a process.
    with RunDirectory.create(server.root) as mine:
        assert list(server.root.iterdir()) == [mine.path]
