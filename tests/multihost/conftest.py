"""Two hosts on this machine: network namespaces with an address each, joined by a cable that can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import IO, Any

import pytest

from fourfold_executor_ray.session import kill_session

NAMES = ("fourfold-a", "fourfold-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Host 0 and host 1; processes that are started on them end with the test."""

    def __init__(self) -> None:
        self._sessions: list[subprocess.Popen[str]] = []
        for name in NAMES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", NAMES[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")

    def start(self, host: int, *command: object, **environment: str) -> subprocess.Popen[str]:
        """A process on a host, in a session of its own."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", NAMES[host], *map(str, command)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._sessions.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", NAMES[1], "link", "set", "cable", "down")

    def close(self) -> None:
        for process in self._sessions:
            kill_session(process.pid)
            process.communicate()
        remove()


def remove() -> None:
    """Whatever is there of the two hosts, also of a run that was killed."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    remove()
    try:
        made = Hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        remove()
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        pytest.skip(f"this user cannot make network namespaces: {why}")
    yield made
    made.close()


def line(stream: IO[Any] | None) -> str:
    assert stream is not None
    return str(stream.readline()).strip()


def wait_for_port(hosts: Hosts, host: int, address: str, port: int) -> float:
    """Wait until somebody listens there; how long a connection from ``host`` takes, in milliseconds."""
    code = (
        "import socket, time\n"
        "until = time.monotonic() + 60\n"
        "while True:\n"
        "    try:\n"
        f"        socket.create_connection(({address!r}, {port}), 1).close()\n"
        "        start = time.perf_counter()\n"
        f"        socket.create_connection(({address!r}, {port}), 1).close()\n"
        "        break\n"
        "    except OSError:\n"
        "        assert time.monotonic() < until\n"
        "        time.sleep(0.1)\n"
        "print((time.perf_counter() - start) * 1e3)\n"
    )
    return float(line(hosts.start(host, "python", "-c", code).stdout))
