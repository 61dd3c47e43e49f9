"""Replicas on several nodes, which are serve processes with loopback addresses of their own: who joins, who is lost."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from .conftest import Start
from .running_server import Server, Stream, wait_until
from .test_lifecycle import completion, wait_until_gone
from .test_replicas import replicas

SECRET = {"FOURFOLD_CLUSTER_SECRET": "what only these tests know"}
NODE = "127.0.0.2"
PROMPTS = ("a", "once upon a time", "b c d", "the end")

_numbers = itertools.count(1)


@pytest.fixture
def cluster(start: Start) -> Callable[..., Server]:
    """Starts nodes of one deployment, which listens where no other test does."""
    address = f"127.{os.getpid() % 250 + 1}.{next(_numbers)}.1"

    def start_node(*arguments: str, **options: Any) -> Server:
        options = {"ready": False, "environment": SECRET, **options}
        return start("--num-blocks", "2000", "--data-parallel-address", address, *arguments, **options)

    return start_node


def head(cluster: Callable[..., Server], *arguments: str, local: int = 1, **options: Any) -> Server:
    size = ("--data-parallel-size", "2", "--data-parallel-size-local", str(local), "--api-server-count", "1")
    return cluster(*size, *arguments, **options)


def headless(cluster: Callable[..., Server], *arguments: str, **options: Any) -> Server:
    place = ("--headless", "--data-parallel-size", "2", "--data-parallel-start-rank", "1", "--node-interface", NODE)
    return cluster(*place, *arguments, **options)


def everything(*servers: Server) -> list[psutil.Process]:
    return [process for server in servers for process in [server.parent, *server.descendants()]]


def wait_for_log(server: Server, text: str, timeout: float = 60) -> None:
    wait_until(lambda: text in server.log, timeout, f"{text!r} in the log:\n{server.log}")


def test_a_node_that_is_lost_costs_no_request_and_may_come_back(cluster: Callable[..., Server]) -> None:
    first, second = head(cluster), headless(cluster)
    first.wait_until_ready()
    with first.client() as client:
        topology = client.get("/topology").json()
    assert [(row["role"], row["replicas"]) for row in topology["nodes"]] == [("head", [0]), ("engines", [1])]
    assert f"({NODE})" in topology["nodes"][1]["node"]
    shown = {process["pid"] for process in topology["processes"]}
    assert shown == {process.pid for process in everything(first, second)}

    bodies = [completion(200, prompt=prompt, seed=number, temperature=0.8) for number, prompt in enumerate(PROMPTS)]
    undisturbed = [Stream(first, "/v1/completions", body) for body in bodies]
    for opened in undisturbed:
        opened.join()
    assert all(first.metric_of("fourfold_generation_tokens_total", engine=str(rank)) > 0 for rank in range(2))

    lost = everything(second)
    disturbed = [Stream(first, "/v1/completions", body) for body in bodies]
    for opened in disturbed:
        opened.wait_for_events(3)
    second.signal(signal.SIGKILL)
    for opened in disturbed:
        opened.join()
    assert [opened.text for opened in disturbed] == [opened.text for opened in undisturbed]
    assert all(opened.done and opened.failure is None for opened in disturbed)
    wait_until_gone(lost)
    assert replicas(first) == ["running", "dead"]
    wait_for_log(first, f"({NODE}) is lost: its connection has ended; it had replicas 1")
    with first.client() as client:
        assert [row["state"] for row in client.get("/topology").json()["nodes"]] == ["running", "lost"]

    again = headless(cluster)
    wait_until(lambda: replicas(first) == ["running", "running"], 60, "the replica to come back")
    with first.client() as client:
        assert client.post("/admin/sleep?level=1").status_code == 200
        psutil.Process(again.engine_pid).kill()
        wait_until(lambda: replicas(first)[1] != "asleep", 10, "the engine's end to be known")
        wait_until(lambda: replicas(first) == ["asleep", "asleep"], 60, "its own node to restart it, asleep as it was")
        assert client.post("/admin/wake_up").status_code == 200
        wait_until(lambda: replicas(first) == ["running", "running"], 10, "both to be awake")

    left = everything(first, again)
    first.signal(signal.SIGTERM)
    assert first.wait(30) == 0
    assert again.wait(30) == 0
    wait_until_gone(left)


@pytest.mark.long
def test_requests_survive_a_node_with_several_replicas(cluster: Callable[..., Server]) -> None:
    """They go from one of them to another, which is lost as well."""
    first = cluster("--data-parallel-size", "3", "--data-parallel-size-local", "1", "--api-server-count", "1")
    place = ("--headless", "--data-parallel-size", "3", "--data-parallel-start-rank", "1", "--node-interface", NODE)
    second = cluster(*place)
    first.wait_until_ready()
    streams = [Stream(first, "/v1/completions", completion(200, seed=number)) for number in range(12)]
    for opened in streams:
        opened.wait_for_events(3)
    lost = everything(second)
    second.signal(signal.SIGKILL)
    for opened in streams:
        opened.join()
    assert [opened.failure for opened in streams] == [None] * 12
    assert all(opened.done for opened in streams)
    assert replicas(first) == ["running", "dead", "dead"]
    wait_until_gone(lost)


def test_a_head_without_replicas_serves_those_of_a_node_that_may_leave(cluster: Callable[..., Server]) -> None:
    first = head(cluster, local=0)
    both = ("--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "2", "--node-interface", NODE)
    second = cluster(*both)
    first.wait_until_ready()
    with first.client() as client:
        assert [row["replicas"] for row in client.get("/topology").json()["nodes"]] == [[], [0, 1]]
        assert client.post("/v1/completions", json=completion(5)).json()["usage"]["completion_tokens"] == 5
        assert client.post("/admin/replicas/1/restart").status_code == 202
        wait_until(lambda: client.get("/topology").json()["replicas"][1]["incarnation"] == 2, 30, "a new incarnation")
        wait_until(lambda: replicas(first) == ["running", "running"], 60, "the replica to be ready again")
    second.signal(signal.SIGTERM)
    assert second.wait(30) == 0
    wait_until(lambda: replicas(first) == ["dead", "dead"], 10, "the head to know")
    assert first.status("/readyz") == 503


def test_nodes_with_different_options_are_refused_by_key_and_name(cluster: Callable[..., Server]) -> None:
    first = head(cluster)
    wait_for_log(first, "waiting for the nodes")
    second = headless(cluster, "--block-size", "32")
    difference = f"({NODE}) has cache.block_size = 32, and rank 0 on "
    assert second.wait(60) == 2
    assert difference in second.lines[-1]
    assert first.wait(30) == 2
    assert difference in first.lines[-1]


def test_a_node_with_another_secret_does_not_get_in(cluster: Callable[..., Server]) -> None:
    first = head(cluster, "--startup-timeout", "20")
    wait_for_log(first, "waiting for the nodes")
    second = headless(cluster, environment={"FOURFOLD_CLUSTER_SECRET": "something else altogether"})
    assert second.wait(60) == 2
    assert "has another --cluster-secret than this one" in second.lines[-1]
    assert first.wait(40) == 1
    assert "no node has joined with replicas 1 within 20 s (--startup-timeout)" in first.lines[-1]


def test_a_node_that_dies_while_it_loads_ends_the_start(cluster: Callable[..., Server]) -> None:
    first, second = head(cluster), headless(cluster)
    wait_for_log(first, "has joined with replicas 1")
    left = everything(first, second)
    second.signal(signal.SIGKILL)
    assert first.wait(30) == 1
    assert f"({NODE}) is lost: its connection has ended; it had replicas 1" in first.lines[-1]
    wait_until_gone(left)


@pytest.mark.parametrize("headless_node", [False, True])
def test_nobody_starts_without_a_secret(cluster: Callable[..., Server], headless_node: bool) -> None:
    server = (headless if headless_node else head)(cluster, environment={})
    assert server.wait(60) == 2
    assert "several nodes need a secret that nobody else has" in server.lines[-1]


def test_a_node_without_a_head_says_whom_it_waited_for(cluster: Callable[..., Server]) -> None:
    server = headless(cluster, "--startup-timeout", "1")
    assert server.wait(60) == 1
    assert "no node answers at tcp://127." in server.lines[-1]


def test_with_a_hybrid_balancer_a_node_serves_its_own_replicas(start: Start) -> None:
    part = ("--data-parallel-size-local", "1", "--data-parallel-start-rank", "2", "--data-parallel-hybrid-lb")
    server = start("--data-parallel-size", "3", *part, "--num-blocks", "2000")
    with server.client() as client:
        topology = client.get("/topology").json()
        assert [(replica["rank"], replica["label"]) for replica in topology["replicas"]] == [(2, "DP2")]
        assert topology["nodes"][0]["replicas"] == [2]
        for rank, status in (("2", 200), ("0", 400)):
            header = {"x-data-parallel-rank": rank}
            assert client.post("/v1/completions", json=completion(2), headers=header).status_code == status
    assert server.metric_of("fourfold_generation_tokens_total", engine="2") == 2
