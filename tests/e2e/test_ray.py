"""The embedded model over the nodes of a Ray cluster gives the ids that it gives uncut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fourfold import LLM
from fourfold.testing.golden import CHATS, COMPLETIONS

from .conftest import ONE_THREAD, Start
from .ray_cluster import RayCluster, started_cluster
from .running_server import Server, Stream, chat, wait_until
from .test_golden import answer
from .test_lifecycle import completion
from .test_replicas import PROMPTS, replicas
from .test_tensor_parallel import IDS, answers, expected


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Two nodes of two CPUs."""
    with started_cluster(2, 2) as cluster:
        yield cluster


def test_golden_cases_in_a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    others = psutil.Process().children(recursive=True)
    with LLM("smollm2", dtype="float32", executor="ray", tensor_parallel_size=2) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_golden_cases_over_two_nodes_through_the_server(cluster: RayCluster, tmp_path: Path) -> None:
    address = cluster.address
    options = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    server = Server(["--dtype", "float32", *options], tmp_path, RAY_ADDRESS=address, **ONE_THREAD)
    try:
        server.wait_until_ready()
        assert f"executor 'ray' (auto): the Ray cluster {address} is given (RAY_ADDRESS)" in server.log
        for prompt, _, max_tokens, expected in COMPLETIONS.values():
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            assert answer(server, "/v1/completions", body)[0] == expected
        for question, _, _, expected in CHATS.values():
            assert answer(server, "/v1/chat/completions", {**chat(question), "model": "smollm2"})[0] == expected
        with server.client() as client:
            topology = client.get("/topology").json()
        ranks = [row for row in topology["processes"] if row["role"] == "worker"]
        assert [row["label"] for row in ranks] == [f"DP0.PP{stage}.TP{place}" for stage in (0, 1) for place in (0, 1)]
        nodes = [row["node"] for row in ranks]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert topology["replicas"][0]["comm"] == "tp=shm,pp=gloo,ep=shm"
        pids = [row["pid"] for row in ranks]
    finally:
        server.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 5, f"the end of {pids}")


def test_streams_outlive_the_node_of_their_replica(cluster: RayCluster, start: Start) -> None:
    layout = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--num-blocks", "2000")
    server = start(*layout, environment={"RAY_ADDRESS": cluster.address})
    nodes = {state["label"]: state["node"] for state in server.states().values() if state["role"] == "worker"}
    assert nodes["DP0.PP0.TP0"] == nodes["DP0.PP0.TP1"] != nodes["DP1.PP0.TP0"] == nodes["DP1.PP0.TP1"]
    streams = [Stream(server, "/v1/completions", completion(300, prompt=prompt)) for prompt in PROMPTS]
    for stream in streams:
        stream.wait_for_events(3)
    cluster.order("kill 1")
    for stream in streams:
        stream.join()
        assert (stream.error, stream.done) == (None, True)
    cluster.order("add 2")
    wait_until(lambda: replicas(server) == ["running"] * 2, 90, "the replica on another node")
