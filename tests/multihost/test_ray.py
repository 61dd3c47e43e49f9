"""A Ray cluster of two hosts: the ids of one process, and the loss of a host told within 5 s."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ADDRESSES, Hosts, line, wait_for_port

pytestmark = pytest.mark.multihost

PORT = 6379
PROGRAM = Path(__file__).parent / "ray_program.py"
TOKEN = "0123456789abcdef" * 4
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "OMP_NUM_THREADS": "1",
}


def start_cluster(hosts: Hosts, folder: Path) -> None:
    ray = [Path(sys.executable).parent / "ray", "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    hosts.start(0, *ray, *head, f"--node-ip-address={ADDRESSES[0]}", **ENVIRONMENT)
    milliseconds = wait_for_port(hosts, 1, ADDRESSES[0], PORT)
    print(f"a connection from host 1 to host 0 takes {milliseconds:.2f} ms")
    hosts.start(1, *ray, f"--address={ADDRESSES[0]}:{PORT}", f"--node-ip-address={ADDRESSES[1]}", **ENVIRONMENT)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_two_hosts_answer_as_one_and_a_lost_one_is_named(folder: Path, hosts: Hosts) -> None:
    start_cluster(hosts, folder)
    address = f"{ADDRESSES[0]}:{PORT}"
    program = hosts.start(0, sys.executable, PROGRAM, RAY_ADDRESS=address, **ENVIRONMENT)
    first = json.loads(line(program.stdout))
    assert first["text"] == " Paris.\n\n"
    assert first["comm"] == "tp=shm,pp=gloo,ep=shm"
    assert program.stdin is not None
    print("go on", file=program.stdin, flush=True)
    assert line(program.stdout) == "going on"
    hosts.cut()
    last = json.loads(line(program.stdout))
    assert "rank 2 on node" in last["error"]
    assert last["seconds"] < 6.0  # one step, and 5 s
