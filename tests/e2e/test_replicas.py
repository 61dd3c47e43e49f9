"""Several replicas behind one port: what runs, who gets what, and what the death of any process costs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from .conftest import Start
from .running_server import Server, Stream, wait_until
from .test_lifecycle import LONG, assert_port_is_free, completion, port_of, wait_until_gone

TWO = ("--data-parallel-size", "2", "--num-blocks", "2000")
SEEDED = {"temperature": 0.8, "seed": 7, "stream_options": {"include_usage": True}}
PROMPTS = ("a", "once upon a time", "b c d", "the end")


def processes(server: Server, role: str) -> dict[str, int]:
    """Label -> pid of the processes of a role, as the run directory says."""
    return {state["label"]: state["pid"] for state in server.states().values() if state["role"] == role}


def replicas(server: Server) -> list[str]:
    with server.client() as client:
        return [replica["state"] for replica in client.get("/topology").json()["replicas"]]


def kill_and_wait_for_another(server: Server, role: str, label: str) -> None:
    victim = processes(server, role)[label]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: processes(server, role).get(label, victim) != victim, 30, f"another {role} {label}")


def complete_all(server: Server, bodies: list[dict[str, Any]], **headers: str) -> list[dict[str, Any]]:
    def post(body: dict[str, Any]) -> dict[str, Any]:
        with server.client() as client:  # a connection of its own, so that API servers take turns
            reply = client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(post, bodies))


def test_five_processes_share_one_port(start: Start) -> None:
    server = start(*TWO)
    children = server.descendants()
    titles = {process.pid: " ".join(process.cmdline()).strip() for process in [server.parent, *children]}
    assert sorted(titles.values()) == [
        "fourfold api_server 0",
        "fourfold api_server 1",
        "fourfold coordinator",
        "fourfold engine_core DP0",
        "fourfold engine_core DP1",
    ]
    with server.client() as client:
        topology = client.get("/topology").json()
    assert {process["pid"] for process in topology["processes"]} == titles.keys()
    assert topology["groups"]["dp"] == [[0, 1]]
    assert topology["replicas"] == [
        {"rank": rank, "label": f"DP{rank}", "state": "running", "incarnation": 1} for rank in range(2)
    ]

    # Each connection goes to the next API server, and requests of both reach both replicas.
    bodies = [completion(20, prompt=PROMPTS[number % 4], seed=number) for number in range(16)]
    complete_all(server, bodies)
    tokens = "fourfold_generation_tokens_total"

    def tokens_of_each() -> list[float] | None:
        counted = [value for _, value in server.series(tokens)]
        return counted if sum(counted) == 16 * 20 else None

    first, second = wait_until(tokens_of_each, 5, "all tokens counted")
    assert first > 0
    assert second > 0
    assert server.metric("fourfold_requests_total") == 16
    assert server.metric("fourfold_request_generation_tokens_sum") == 16 * 20

    # A replica can be asked for, if it exists.
    complete_all(server, [completion(5)] * 4, **{"x-data-parallel-rank": "1"})
    wait_until(lambda: server.metric_of(tokens, engine="1") == second + 20, 5, "20 tokens of DP1")
    with server.client() as client:
        for wrong in ("2", "-1", "x", "1.0", "99999999999"):
            reply = client.post("/v1/completions", json=completion(1), headers={"x-data-parallel-rank": wrong})
            assert reply.status_code == 400
            assert "the ranks are 0 to 1" in reply.json()["error"]["message"]

    port, everything = port_of(server), [server.parent, *children]
    server.signal(signal.SIGKILL)
    wait_until_gone(everything, 5)
    server.wait(10)
    assert_port_is_free(port)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_streams_outlive_their_replica(start: Start, size: int) -> None:
    server = start("--data-parallel-size", str(size), "--num-blocks", "2000")
    bodies = [completion(200, prompt=prompt, **SEEDED, **more) for prompt in PROMPTS for more in VARIANTS]
    undisturbed = [Stream(server, "/v1/completions", body) for body in bodies]
    for opened in undisturbed:
        opened.join()
    disturbed = [Stream(server, "/v1/completions", body) for body in bodies]
    whole = {"prompt": "whole", "max_tokens": 300, "ignore_eos": True, "seed": 3}
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(complete_all, server, [{**LONG, **whole}] * 2)
        for opened in disturbed:
            opened.wait_for_events(3)
        victim = processes(server, "engine_core")["DP0"]
        os.kill(victim, signal.SIGKILL)
        for opened in disturbed:
            opened.join()
        answers = answered.result()
    for opened, reference in zip(disturbed, undisturbed):
        assert opened.error is None
        assert opened.done
        assert opened.text == reference.text
        assert opened.events[-1]["usage"]["completion_tokens"] == reference.events[-1]["usage"]["completion_tokens"]
        assert tokens_with_logprobs(opened) == tokens_with_logprobs(reference)
    assert answers[0]["choices"] == answers[1]["choices"]
    wait_until(lambda: replicas(server) == ["running"] * size, 60, "all replicas again")
    assert processes(server, "engine_core")["DP0"] != victim
    complete_all(server, [completion(3)] * 2, **{"x-data-parallel-rank": "0"})
    wait_until(lambda: server.metric("fourfold_num_requests_running") == 0, 5, "all replicas idle")
    wait_until(lambda: server.metric("fourfold_kv_cache_usage") == 0, 5, "all blocks free")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 100, "ignore_eos": False, "stop": ["zq"]},
    {"logprobs": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3},
]


def tokens_with_logprobs(stream: Stream) -> list[tuple[str, float]]:
    return [
        (token, round(logprob, 3))
        for event in stream.events
        for choice in event.get("choices", [])
        if choice.get("logprobs")
        for token, logprob in zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"])
    ]


def test_api_servers_and_the_coordinator_come_back(start: Start) -> None:
    server = start(*TWO)
    streams = [Stream(server, "/v1/completions", LONG) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(2)
    engines = processes(server, "engine_core")
    kill_and_wait_for_another(server, "coordinator", "")
    kill_and_wait_for_another(server, "api_server", "1")
    wait_until(lambda: sum(opened.failure is not None for opened in streams) == 2, 10, "two streams to break")
    wait_until(lambda: server.metric("fourfold_num_requests_running") == 2, 10, "the requests of the dead server ended")
    assert processes(server, "engine_core") == engines
    ended = Counter(opened.failure is not None for opened in streams)
    assert ended == {True: 2, False: 2}
    for opened in streams:
        opened.close()

    def answered_by() -> set[str]:
        before = {label: psutil.Process(pid).cpu_times().user for label, pid in processes(server, "api_server").items()}
        complete_all(server, [completion(50)] * 8)
        now = {label: psutil.Process(pid).cpu_times().user for label, pid in processes(server, "api_server").items()}
        return {label for label, seconds in now.items() if seconds > before.get(label, seconds)}

    wait_until(lambda: answered_by() == {"0", "1"}, 30, "both API servers at work")
    wait_until(lambda: server.metric("fourfold_num_requests_running") == 0, 5, "all replicas idle")


def test_a_replica_is_restarted_on_wish_without_losing_a_request(start: Start) -> None:
    server = start(*TWO, "--drain-timeout", "0.3")
    engines = processes(server, "engine_core")
    streams = [Stream(server, "/v1/completions", completion(800, **SEEDED)) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(2)
    with server.client() as client:
        assert client.post("/admin/replicas/7/restart").status_code == 404
        reply = client.post("/admin/replicas/1/restart")
        assert (reply.status_code, reply.json()) == (202, {"rank": 1, "state": "draining"})
        wait_until(lambda: replicas(server)[1] == "draining", 1, "DP1 draining")
        assert client.post("/admin/replicas/1/restart").status_code == 409
        assert client.get("/readyz").status_code == 200
        pinned = client.post("/v1/completions", json=completion(1), headers={"x-data-parallel-rank": "1"})
        assert pinned.status_code == 503
    wait_until(lambda: replicas(server) == ["running", "running"], 60, "both replicas again")
    assert processes(server, "engine_core")["DP0"] == engines["DP0"]
    assert processes(server, "engine_core")["DP1"] != engines["DP1"]
    for opened in streams:
        opened.join()
    assert [opened.error for opened in streams] == [None] * 4
    assert len({opened.text for opened in streams}) == 1


def test_a_signal_drains_all_api_servers(start: Start) -> None:
    server = start(*TWO, "--drain-timeout", "60")
    everything = [server.parent, *server.descendants()]
    streams = [Stream(server, "/v1/completions", completion(800, **SEEDED)) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(2)
    clients = [server.client() for _ in range(2)]
    for client in clients:
        assert client.get("/readyz").status_code == 200
    server.signal(signal.SIGTERM, group=True)
    for client in clients:
        before = time.monotonic()
        wait_until(lambda client=client: client.get("/readyz").status_code == 503, 5, "/readyz is 503")
        assert time.monotonic() - before < 0.5
        assert client.post("/v1/completions", json=completion(1)).status_code == 503
        client.close()
    for opened in streams:
        opened.join()
    assert [opened.done for opened in streams] == [True] * 4
    assert server.wait(20) == 0
    wait_until_gone(everything, 1)
    assert list(server.root.iterdir()) == []


def test_a_drain_of_all_api_servers_has_a_deadline_and_a_second_signal_has_none(start: Start) -> None:
    server = start(*TWO, "--drain-timeout", "0.5")
    streams = [Stream(server, "/v1/completions", LONG) for _ in range(2)]
    for opened in streams:
        opened.wait_for_events(2)
    server.signal(signal.SIGTERM)
    for opened in streams:
        opened.join(10)
        assert opened.error is not None
        assert "shutting down" in opened.error["message"]
    assert server.wait(15) == 0
    second = start(*TWO)
    everything = [second.parent, *second.descendants()]
    opened = Stream(second, "/v1/completions", LONG)
    opened.wait_for_events(2)
    second.signal(signal.SIGTERM)
    wait_until(lambda: second.status("/readyz") == 503, 5, "/readyz is 503")
    second.signal(signal.SIGTERM)
    assert second.wait(5) == 1
    opened.join(10)
    wait_until_gone(everything, 1)


def test_streams_outlive_a_replica_that_stands_still(start: Start) -> None:
    server = start(*TWO, "--stall-timeout", "1")
    opened = [Stream(server, "/v1/completions", completion(600, **SEEDED)) for _ in range(4)]
    for stream in opened:
        stream.wait_for_events(2)
    os.kill(processes(server, "engine_core")["DP1"], signal.SIGSTOP)
    for stream in opened:
        stream.join()
    assert [stream.error for stream in opened] == [None] * 4
    assert len({stream.text for stream in opened}) == 1
    wait_until(lambda: replicas(server) == ["running", "running"], 60, "both replicas again")


def test_the_exit_policy_holds_for_every_replica(start: Start) -> None:
    server = start(*TWO, "--on-failure", "exit")
    everything = [server.parent, *server.descendants()]
    os.kill(processes(server, "engine_core")["DP1"], signal.SIGKILL)
    assert server.wait(10) == 1
    assert server.lines[-1] == "Error: engine_core DP1 was killed by signal 9 (SIGKILL) while running"
    wait_until_gone(everything, 1)


@pytest.mark.long
def test_connections_are_spread_evenly_over_api_servers(start: Start) -> None:
    server = start("--api-server-count", "4")
    pids = processes(server, "api_server")
    assert len(server.descendants()) == 4
    with httpx.Client(limits=httpx.Limits(max_connections=400)) as _:
        connections = [server.client() for _ in range(400)]
        try:
            for client in connections:
                assert client.get("/livez").status_code == 200
            counts = {
                label: sum(one.status == "ESTABLISHED" for one in psutil.Process(pid).net_connections("tcp"))
                for label, pid in pids.items()
            }
        finally:
            for client in connections:
                client.close()
    assert all(70 <= count <= 130 for count in counts.values()), counts


@pytest.mark.long
def test_seventeen_processes(start: Start) -> None:
    server = start("--data-parallel-size", "4", "--tensor-parallel-size", "2", "--num-blocks", "600")
    everything = [server.parent, *server.descendants()]
    assert len(everything) == 17
    with server.client() as client:
        topology = client.get("/topology").json()
    counts = Counter(process["role"] for process in topology["processes"])
    assert counts == {"api_server": 4, "engine_core": 4, "worker": 8, "coordinator": 1}
    assert {process["pid"] for process in topology["processes"]} == {process.pid for process in everything}
    stream = Stream(server, "/v1/completions", {**LONG, "max_tokens": 300})
    stream.wait_for_events(2)
    for label in ("DP0.PP0.TP1", "DP2.PP0.TP0"):
        os.kill(processes(server, "worker")[label], signal.SIGKILL)
    stream.join()
    assert stream.error is None
    wait_until(lambda: replicas(server) == ["running"] * 4, 120, "all replicas again")
    assert len(server.descendants()) == 16
