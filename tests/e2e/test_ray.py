"""The embedded model over the nodes of a Ray cluster gives the ids that it gives uncut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fourfold import LLM
from fourfold_executor_ray.session import kill_session

from .conftest import ONE_THREAD
from .running_server import Server, chat, wait_until
from .test_golden import CHATS, COMPLETIONS, answer
from .test_tensor_parallel import IDS, answers, expected

CLUSTER = Path(__file__).parents[2] / "plugins" / "executor_ray" / "tests" / "cluster_program.py"


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of two nodes of 2 CPUs."""
    process = subprocess.Popen(
        [sys.executable, "-P", CLUSTER, "2", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        kill_session(process.pid)
        process.communicate()


def test_golden_cases_in_a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    with LLM("smollm2", dtype="float32", executor="ray", tensor_parallel_size=2) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS
    assert psutil.Process().children(recursive=True) == []


def test_golden_cases_over_two_nodes_through_the_server(address: str, tmp_path: Path) -> None:
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
