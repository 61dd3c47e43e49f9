"""A Ray cluster of two hosts, through the HTTP API: the texts of one process, a host lost in a stream."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from fourfold.testing.hosts import ADDRESSES, Hosts

from .conftest import answers, ask, serve, wait_for, wait_for_port
from .golden import BODIES, LONG, TEXTS

pytestmark = pytest.mark.multihost

PORT = 6379
TOKEN = "0123456789abcdef" * 4
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "OMP_NUM_THREADS": "1",
}
ADDRESS = f"{ADDRESSES[0]}:{PORT}"
SHARED = ("--dtype", "float32", "--max-model-len", "512", "--num-blocks", "200", "--tensor-parallel-size", 2)


def start_cluster(hosts: Hosts, folder: Path) -> None:
    """Two nodes of two CPUs."""
    ray = [Path(sys.executable).parent / "ray", "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    hosts.start(0, *ray, *head, f"--node-ip-address={ADDRESSES[0]}", environment=ENVIRONMENT)
    wait_for_port(hosts, 1, ADDRESSES[0], PORT)
    hosts.start(1, *ray, f"--address={ADDRESS}", f"--node-ip-address={ADDRESSES[1]}", environment=ENVIRONMENT)


def test_two_stages_on_two_hosts_and_a_lost_host_is_named(tmp_path: Path, folder: Path, hosts: Hosts) -> None:
    start_cluster(hosts, folder)
    serve(hosts, 0, tmp_path / "a", *SHARED, "--pipeline-parallel-size", 2, RAY_ADDRESS=ADDRESS, **ENVIRONMENT)
    assert [answer["text"] for answer in answers(ask(hosts, *BODIES))] == TEXTS
    client = ask(hosts, {**LONG, "prompt": "a", "max_tokens": 400})
    hosts.cut()
    (lost,) = answers(client)
    assert "rank 2 on node" in lost["error"]
    assert lost["seconds"] < 6.0  # one step, and 5 s


def test_a_host_that_dies_while_it_loads_ends_the_start_by_name(tmp_path: Path, folder: Path, hosts: Hosts) -> None:
    start_cluster(hosts, folder)
    log = tmp_path / "a" / "log"
    server = serve(hosts, 0, tmp_path / "a", *SHARED, "--pipeline-parallel-size", 2, RAY_ADDRESS=ADDRESS, **ENVIRONMENT)
    wait_for(lambda: "DP0.PP1.TP0 on " in log.read_text(), server, "its ranks start")
    hosts.kill(1)
    assert server.wait(120) == 1
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("Error: ")]
    assert re.search(r"(rank|node) .*\bnode\b", error), error
    held = [psutil.Process(pid).cmdline() for pid in hosts.processes(0)]
    assert not [command for command in held if "fourfold" in " ".join(command)]


@pytest.mark.parametrize("loss", ["cut", "kill"])
def test_streams_go_on_without_the_host_of_their_replica(tmp_path: Path, folder: Path, hosts: Hosts, loss: str) -> None:
    start_cluster(hosts, folder)
    shared = (*SHARED, "--data-parallel-size", 2, "--api-server-count", 1)
    serve(hosts, 0, tmp_path / "a", *shared, RAY_ADDRESS=ADDRESS, **ENVIRONMENT)
    bodies = [{**LONG, "prompt": prompt, "seed": number} for number, prompt in enumerate("abcd")]
    undisturbed = answers(ask(hosts, *bodies))
    client = ask(hosts, *bodies)
    hosts.cut() if loss == "cut" else hosts.kill(1)
    assert answers(client) == undisturbed
    assert all(answer["error"] is None for answer in undisturbed)
