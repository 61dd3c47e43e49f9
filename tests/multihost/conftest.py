"""Two hosts for each test, and how deployments and clients are started on them."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import pytest

from fourfold.testing.hosts import Hosts, NoHosts

PROGRAM = Path(__file__).parent / "http_program.py"
URL = "http://127.0.0.1:8000"
SECRET = {"FOURFOLD_CLUSTER_SECRET": "what only this test knows"}

Make = Callable[..., Hosts]


@pytest.fixture
def make_hosts() -> Iterator[Make]:
    """Makes the hosts, with the cable that a test wants."""
    made: list[Hosts] = []

    def make(**cable: Any) -> Hosts:
        try:
            made.append(Hosts(**cable))
        except NoHosts as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture
def hosts(make_hosts: Make) -> Hosts:
    return make_hosts()


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def line(stream: IO[Any] | None) -> str:
    assert stream is not None
    return str(stream.readline()).strip()


def serve(hosts: Hosts, host: int, folder: Path, *arguments: object, **environment: str) -> Popen[str]:
    """``fourfold serve`` on a host; what it says is in ``folder / "log"``."""
    folder.mkdir()
    command = (sys.executable, "-m", "fourfold_server.cli", "serve", *arguments)
    variables = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), **SECRET, **environment}
    return hosts.start(host, *command, log=folder / "log", environment=variables)


def ask(hosts: Hosts, *bodies: dict[str, Any]) -> Popen[str]:
    """A client on host 0, whose streams have begun."""
    client = hosts.start(0, sys.executable, PROGRAM, URL, json.dumps(bodies))
    assert line(client.stdout) == "streaming"
    return client


def answers(client: Popen[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(line(client.stdout))
    return found


def wait_for_port(hosts: Hosts, host: int, address: str, port: int) -> None:
    """Wait until ``host`` reaches somebody there."""
    code = (
        "import socket, time\n"
        "until = time.monotonic() + 60\n"
        "while True:\n"
        "    try:\n"
        f"        socket.create_connection(({address!r}, {port}), 1).close()\n"
        "        break\n"
        "    except OSError:\n"
        "        assert time.monotonic() < until\n"
        "        time.sleep(0.1)\n"
        "print('open', flush=True)\n"
    )
    assert line(hosts.start(host, sys.executable, "-c", code).stdout) == "open"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    pause, deadline = threading.Event(), time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        pause.wait(0.05)


def wait_for(condition: Callable[[], bool], process: Popen[str], what: str) -> None:
    """Until it holds; ``process`` must not end before."""

    def holds() -> bool:
        found = condition()
        assert found or process.poll() is None, f"the process ended before {what}"
        return found

    wait_until(holds, what)
