"""Nodes of our own on two hosts: ranks of one engine and replicas of one deployment, and the cable cut in a stream."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from .conftest import ADDRESSES, Hosts, line

pytestmark = pytest.mark.multihost

PROGRAM = Path(__file__).parent / "http_program.py"
URL = "http://127.0.0.1:8000"
ENVIRONMENT = {"FOURFOLD_CLUSTER_SECRET": "what only this test knows", "OMP_NUM_THREADS": "1"}
SHARED = ("--dtype", "float32", "--max-model-len", "512", "--num-blocks", "200")
GOLDEN = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
LONG = {"model": "smollm2", "max_tokens": 120, "ignore_eos": True, "temperature": 0.8}


def serve(hosts: Hosts, host: int, folder: Path, *arguments: str) -> None:
    folder.mkdir()
    command = (sys.executable, "-m", "fourfold_server.cli", "serve", *SHARED, *arguments)
    hosts.start(host, *command, XDG_RUNTIME_DIR=str(folder), **ENVIRONMENT)


def ask(hosts: Hosts, *bodies: dict[str, Any]) -> Popen[str]:
    """A client on host 0, whose streams have begun."""
    client = hosts.start(0, sys.executable, PROGRAM, URL, json.dumps(bodies))
    assert line(client.stdout) == "streaming"
    return client


def answers(client: Popen[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(line(client.stdout))
    return found


def test_two_stages_on_two_hosts_and_a_lost_host_is_named(tmp_path: Path, hosts: Hosts) -> None:
    layout = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--nnodes", "2")
    shared = (*layout, "--master-address", ADDRESSES[0])
    serve(hosts, 0, tmp_path / "a", *shared)
    serve(hosts, 1, tmp_path / "b", *shared, "--headless", "--node-rank", "1", "--node-interface", "cable")
    assert answers(ask(hosts, GOLDEN))[0]["text"] == " Paris.\n\n"
    client = ask(hosts, {**LONG, "prompt": "a", "max_tokens": 400})
    hosts.cut()
    (lost,) = answers(client)
    assert "rank 2 is lost with node " in lost["error"]
    assert f"({ADDRESSES[1]}): it has given no sign of life for 4 s" in lost["error"]
    assert lost["seconds"] < 6.0  # one step, and 5 s


def test_streams_go_on_without_the_host_of_their_replica(tmp_path: Path, hosts: Hosts) -> None:
    shared = ("--data-parallel-size", "2", "--data-parallel-address", ADDRESSES[0])
    serve(hosts, 0, tmp_path / "a", *shared, "--data-parallel-size-local", "1", "--api-server-count", "1")
    serve(hosts, 1, tmp_path / "b", *shared, "--headless", "--data-parallel-start-rank", "1")
    bodies = [{**LONG, "prompt": prompt, "seed": number} for number, prompt in enumerate("abcd")]
    undisturbed = answers(ask(hosts, *bodies))
    client = ask(hosts, *bodies)
    hosts.cut()
    assert answers(client) == undisturbed
    assert all(answer["error"] is None for answer in undisturbed)
