"""The lifecycle at several replicas, on the embedded model: clients that leave, signals, killed ranks, slow starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import ONE_THREAD, Start
from .running_server import TIMEOUT, Server, Stream, wait_until
from .test_faults import assert_nothing_is_left, everything_of, wait_until_gone
from .test_lifecycle import completion, port_of
from .test_replicas import complete_all, processes, replicas

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.parametrize("size", [2, 4])]
USAGE = {"stream_options": {"include_usage": True}}
PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5,", "Here is the English alphabet: ABC", "Once upon a time")
SOON = 2.0
"""Seconds in which what takes one at most is done on a machine that does other things too."""

Begin = Callable[..., Server]


@pytest.fixture
def begin(start: Start, size: int) -> Begin:
    """Starts the embedded model on ``size`` replicas."""

    def begin(*arguments: str, ready: bool = True) -> Server:
        options = ("--data-parallel-size", str(size), "--max-model-len", "8192", "--num-blocks", "1500")
        return start(*options, *arguments, ready=ready, model=Path("smollm2"), load_format="auto")

    return begin


def total(server: Server, *names: str) -> float:
    return sum(server.metric(f"fourfold_{name}") for name in names)


def wait_until_idle(server: Server, timeout: float = SOON) -> None:
    """No request anywhere, no block in use, and no further step."""

    def idle() -> bool:
        return total(server, "num_requests_running", "num_requests_waiting", "kv_cache_usage") == 0

    wait_until(idle, timeout, "no request and no block in use")
    before = total(server, "steps_total")
    threading.Event().wait(0.4)
    assert total(server, "steps_total") == before


def send(server: Server, body: dict[str, Any], *, receive_buffer: int = 0) -> socket.socket:
    """A connection that has sent a request and reads nothing yet."""
    url = httpx.URL(server.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(TIMEOUT)
    connection.connect((url.host, url.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def footprint(server: Server) -> tuple[int, int, float]:
    """Descriptors, threads and megabytes of all processes together."""
    found = everything_of(server)
    megabytes = sum(process.memory_full_info().uss for process in found) / 1e6
    return sum(process.num_fds() for process in found), sum(process.num_threads() for process in found), megabytes


# --- clients that leave ----------------------------------------------------------------------------------------------


def test_whatever_a_lost_client_asked_for_ends(begin: Begin, size: int) -> None:
    server = begin("--max-num-seqs", "1", "--max-num-batched-tokens", "512")
    stream = Stream(server, "/v1/completions", completion(4000, stream_options=USAGE["stream_options"]))
    stream.wait_for_events(3)
    stream.hang_up()
    wait_until_idle(server)
    for body in (
        completion(1, prompt=[5] * 4000),  # in the middle of its prompt
        completion(4000),  # not streamed
        completion(4000, n=3, stream=True),
        completion(4000, prompt=["a", "b", "c"], stream=True),
    ):
        connection = send(server, body)
        wait_until(lambda: total(server, "num_requests_running") > 0, TIMEOUT, "the request to run")
        connection.close()
        wait_until_idle(server)
    running = [Stream(server, "/v1/completions", completion(4000)) for _ in range(size)]
    for one in running:
        one.wait_for_events(1)
    queued = [send(server, completion(4000, stream=True)) for _ in range(3)]
    wait_until(lambda: total(server, "num_requests_waiting") == 3, TIMEOUT, "three to be queued")
    for connection in queued:
        connection.close()
    wait_until(lambda: total(server, "num_requests_waiting") == 0, SOON, "nobody to be queued")
    assert total(server, "num_requests_running") == size
    for one in running:
        one.hang_up()
    wait_until_idle(server)
    assert complete_all(server, [completion(4, prompt=PROMPTS[0])])[0]["choices"][0]["text"] == " Paris.\n\n"


def test_hundreds_of_lost_clients_leave_nothing(begin: Begin) -> None:
    server = begin()

    def lose(count: int) -> None:
        for number in range(count):
            with send(server, completion(4000, stream=True, n=1 + number % 3)) as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        wait_until_idle(server, TIMEOUT)

    lose(60)
    before = footprint(server)
    lose(300)
    descriptors, threads, megabytes = footprint(server)
    assert descriptors <= before[0] + 4
    assert threads <= before[1] + 2
    assert megabytes < before[2] + 40


def test_a_client_that_stops_reading_hurts_nobody(begin: Begin) -> None:
    server = begin()
    alone = complete_all(server, [completion(40, prompt=PROMPTS[3])])[0]["choices"][0]["text"]
    before = footprint(server)[2]
    stuck = [send(server, completion(2000, stream=True, logprobs=5), receive_buffer=4096) for _ in range(3)]
    wait_until(lambda: total(server, "num_requests_running") == 3, TIMEOUT, "three to run")
    together = complete_all(server, [completion(40, prompt=PROMPTS[3])] * 3)
    assert [answer["choices"][0]["text"] for answer in together] == [alone] * 3
    assert footprint(server)[2] < before + 150
    for connection in stuck:
        connection.close()
    wait_until_idle(server, TIMEOUT)


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_and_queued_requests_finish(begin: Begin, size: int, signum: signal.Signals) -> None:
    server = begin("--max-num-seqs", "2", "--drain-timeout", "300")
    running = [Stream(server, "/v1/completions", completion(60, **USAGE)) for _ in range(2 * size)]
    for stream in running:
        stream.wait_for_events(1)
    queued = [Stream(server, "/v1/completions", completion(5, **USAGE)) for _ in range(2)]
    wait_until(lambda: total(server, "num_requests_waiting") == 2, TIMEOUT, "two to be queued")
    everything, clients = everything_of(server), [server.client() for _ in range(size)]
    for client in clients:  # one for each API server
        assert client.get("/readyz").status_code == 200
    server.signal(signum)
    for client in clients:
        before = time.monotonic()
        wait_until(lambda client=client: client.get("/readyz").status_code == 503, TIMEOUT, "/readyz is 503")
        assert time.monotonic() - before < 0.5
        assert client.get("/livez").status_code == 200
        assert client.post("/v1/completions", json=completion(1)).status_code == 503
        client.close()
    with server.client() as newcomer:
        assert newcomer.post("/v1/completions", json=completion(1)).status_code == 503
    for stream in running + queued:
        stream.join(300)
        assert (stream.error, stream.done) == (None, True)
    assert [stream.events[-1]["usage"]["completion_tokens"] for stream in running + queued] == [60] * 2 * size + [5, 5]
    assert server.wait(20) == 0
    wait_until_gone(everything)
    assert list(server.root.iterdir()) == []


def test_a_drain_ends_with_error_events_and_a_second_signal_at_once(begin: Begin, size: int) -> None:
    server = begin("--drain-timeout", "1")
    streams = [Stream(server, "/v1/completions", completion(4000)) for _ in range(2 * size)]
    for stream in streams:
        stream.wait_for_events(1)
    server.signal(signal.SIGTERM)
    for stream in streams:
        stream.join(20)
        assert stream.error is not None
        assert "shutting down" in stream.error["message"]
    assert server.wait(20) == 0
    again = begin("--drain-timeout", "300")
    stream = Stream(again, "/v1/completions", completion(4000))
    stream.wait_for_events(1)
    everything = everything_of(again)
    again.signal(signal.SIGTERM)
    wait_until(lambda: again.status("/readyz") == 503, TIMEOUT, "/readyz is 503")
    before = time.monotonic()
    again.signal(signal.SIGTERM)
    assert again.wait(20) == 1
    assert time.monotonic() - before < SOON + 1
    stream.join(10)
    wait_until_gone(everything)
    assert list(again.root.iterdir()) == []


# --- killed ranks ----------------------------------------------------------------------------------------------------

RANKS = {2: 3, 4: 1}
"""Of each replica: with more the machine has more processes than it can start in a test."""


def victim(server: Server, size: int) -> int:
    """Rank 1 of the first replica, or its only one, which is its engine."""
    ranks = processes(server, "worker" if RANKS[size] > 1 else "engine_core")
    return ranks["DP0.PP0.TP1" if RANKS[size] > 1 else "DP0"]


def ask(server: Server, *, until: int = 0) -> tuple[list[Stream], Callable[[], list[str]]]:
    """Four streams, with so many events behind them, and two requests that are not streamed; what all of them say."""
    bodies = [completion(60, prompt=prompt, **USAGE) for prompt in PROMPTS]
    streams = [Stream(server, "/v1/completions", body) for body in bodies]
    pool = ThreadPoolExecutor(2)
    whole = [pool.submit(complete_all, server, [completion(60, prompt=prompt)]) for prompt in PROMPTS[:2]]
    for stream in streams:
        stream.wait_for_events(until)

    def texts() -> list[str]:
        for stream in streams:
            stream.join(300)
            assert (stream.error, stream.done) == (None, True)
            assert stream.events[-1]["usage"]["completion_tokens"] == 60
        answers = [one.result(300)[0]["choices"][0]["text"] for one in whole]
        pool.shutdown()
        return [*(stream.text for stream in streams), *answers]

    return streams, texts


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_when_a_rank_is_lost(begin: Begin, size: int, signum: signal.Signals) -> None:
    server = begin("--tensor-parallel-size", str(RANKS[size]), "--stall-timeout", "4")
    _, undisturbed = ask(server)
    expected = undisturbed()
    _, texts = ask(server, until=2)
    os.kill(victim(server, size), signum)
    assert server.status("/readyz") == 200
    assert texts() == expected
    wait_until(lambda: replicas(server) == ["running"] * size, 180, "all replicas again")
    how = "was killed by signal 9 (SIGKILL)" if signum is signal.SIGKILL else "stopped by a signal for 4 s"
    assert any(how in line for line in server.lines), server.log
    if RANKS[size] > 1 and signum is signal.SIGKILL:
        assert f"rank 1 {how}" in server.log
    wait_until_idle(server, TIMEOUT)


def test_with_the_exit_policy_all_hear_of_a_lost_rank(begin: Begin, size: int) -> None:
    server = begin("--tensor-parallel-size", str(RANKS[size]), "--on-failure", "exit")
    everything = everything_of(server)
    streams = [Stream(server, "/v1/completions", completion(4000)) for _ in range(4)]
    with ThreadPoolExecutor(2) as pool, server.client() as client:
        whole = [pool.submit(client.post, "/v1/completions", json=completion(4000)) for _ in range(2)]
        for stream in streams:
            stream.wait_for_events(1)
        wait_until(lambda: total(server, "num_requests_running") == 6, TIMEOUT, "all to run")
        os.kill(victim(server, size), signal.SIGKILL)
        for stream in streams:
            stream.join(3 + SOON)
            assert stream.failure is not None or stream.error is not None
        for answer in whole:
            error = answer.exception(3 + SOON)
            assert isinstance(error, httpx.HTTPError) or answer.result().status_code in (500, 503)
    assert server.wait(20) == 1
    assert "was killed by signal 9 (SIGKILL)" in server.lines[-1]
    wait_until_gone(everything)


# --- starts ----------------------------------------------------------------------------------------------------------


def test_a_slow_start_is_alive_and_not_ready(begin: Begin, size: int) -> None:
    server = begin(ready=False)

    def engines() -> dict[str, int]:
        return processes(server, "engine_core")

    wait_until(lambda: len(engines()) == size, 60, "all engines to start")
    pids = engines()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)

    def answers() -> list[tuple[int, int, int, bool]]:
        found = []
        for _ in range(2 * size):  # whichever API server is asked
            with server.client() as client:
                began = time.monotonic()
                reply = client.post("/v1/completions", json=completion(1))
                assert time.monotonic() - began < SOON
                live, ready = client.get("/livez").status_code, client.get("/readyz").status_code
            found.append((live, ready, reply.status_code, "retry-after" in reply.headers))
        return found

    try:
        wait_until(lambda: len(processes(server, "api_server")) == size, 60, "all API servers to start")
        assert answers() == [(200, 503, 503, True)] * 2 * size
    finally:
        for label in ("DP0", *pids):  # one is enough to serve
            os.kill(pids[label], signal.SIGCONT)
            if label == "DP0":
                wait_until(lambda: server.status("/readyz") == 200, 180, "the first replica")
    complete_all(server, [completion(2)] * 2)
    server.wait_until_ready()
    assert replicas(server) == ["running"] * size


@pytest.mark.parametrize("moment", ["loading", "idle", "generating", "a clean exit"])
def test_the_death_of_the_server_is_that_of_everything(begin: Begin, moment: str) -> None:
    memory = set(os.listdir("/dev/shm"))
    server = begin(ready=moment != "loading")
    if moment == "loading":
        _ = server.engine_pid
    streams = [Stream(server, "/v1/completions", completion(4000))] * (moment == "generating")
    for stream in streams:
        stream.wait_for_events(2)
    everything, port = everything_of(server), port_of(server)
    server.signal(signal.SIGTERM if moment == "a clean exit" else signal.SIGKILL)
    assert_nothing_is_left(server, everything, port, memory)
    assert server.wait(10) == (0 if moment == "a clean exit" else -signal.SIGKILL)
    for stream in streams:
        stream.join(10)


@pytest.fixture
def port_thief() -> Iterator[None]:
    """Takes free ports as fast as it can, and holds the last few hundred."""
    stop = threading.Event()

    def steal() -> None:
        held: list[socket.socket] = []
        while not stop.wait(0.002):
            with contextlib.suppress(OSError):
                held.append(socket.create_server(("127.0.0.1", 0)))
            while len(held) > 300:
                held.pop(0).close()
        for one in held:
            one.close()

    thread = threading.Thread(target=steal)
    thread.start()
    yield
    stop.set()
    thread.join(TIMEOUT)


@pytest.mark.usefixtures("port_thief")
def test_deployments_that_start_at_once_do_not_meet(tiny_model: Path, tmp_path: Path, size: int) -> None:
    options = [str(tiny_model), "--load-format", "dummy", "--dtype", "float32", "--served-model-name", "tiny"]
    options += ["--data-parallel-size", str(size), "--num-blocks", "600"]
    for _ in range(3):
        servers = [Server(options, tmp_path, **ONE_THREAD) for _ in range(8 // size)]
        try:
            urls = {server: wait_until(lambda server=server: _url(server), 300, "its address") for server in servers}
            assert len(set(urls.values())) == len(servers)
            for server, url in urls.items():
                with httpx.Client(base_url=url, timeout=TIMEOUT, verify=False) as client:
                    pids = {process["pid"] for process in client.get("/topology").json()["processes"]}
                    assert client.post("/v1/completions", json=completion(2)).status_code == 200
                assert pids == {process.pid for process in everything_of(server)}
                assert len(pids) == 2 * size + 1
            for server in servers:
                server.signal(signal.SIGTERM)
            assert [server.wait(60) for server in servers] == [0] * len(servers)
        finally:
            for server in servers:
                server.kill()


def _url(server: Server) -> str | None:
    """Where it says that it is ready; the run directories of all of them lie together."""
    assert server.process.poll() is None, server.log
    line = next((line for line in server.lines if " ready in " in line), None)
    return None if line is None else line.split(" at ")[1].split(" ")[0]
