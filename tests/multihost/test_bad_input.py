"""What can be wrong between two hosts is one error, in time, naming the node; nothing is left on either."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from fourfold.testing.hosts import ADDRESSES, INTERFACE, Hosts

from .conftest import line, serve, wait_for

pytestmark = pytest.mark.multihost

IN_VAIN = 20
"""Seconds that a node waits for another one."""
IN_PEACE = 120
"""The same where it comes."""
NAME = os.uname().nodename
HOLDER = f"""
import socket, sys
held = socket.create_server(({ADDRESSES[0]!r}, int(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a deployment is laid over two hosts."""

    shared: tuple[object, ...]
    first: tuple[object, ...]
    second: tuple[object, ...]
    port: int
    absent: str
    """What the first node says of a second one that never came."""
    taken: str
    """How it names its own port."""


RANKS = Layout(
    shared=("--pipeline-parallel-size", 2, "--nnodes", 2, "--master-address", ADDRESSES[0]),
    first=(),
    second=("--headless", "--node-rank", 1),
    port=29501,
    absent=f"no node has joined tcp://{ADDRESSES[0]}:29501 as number 1 within {IN_VAIN} s",
    taken="--master-address and --master-port",
)
REPLICAS = Layout(
    shared=("--data-parallel-size", 2, "--data-parallel-address", ADDRESSES[0]),
    first=("--data-parallel-size-local", 1, "--api-server-count", 1),
    second=("--headless", "--data-parallel-start-rank", 1),
    port=29550,
    absent=f"no node has joined with replicas 1 within {IN_VAIN} s (--startup-timeout)",
    taken="--data-parallel-address and --data-parallel-rpc-port",
)


class Pair:
    """The two nodes of a deployment that is to fail."""

    def __init__(self, hosts: Hosts, folder: Path, layout: Layout) -> None:
        self.hosts, self.layout = hosts, layout
        self.patience = IN_VAIN
        self._folder = folder

    def first(self, *arguments: object, **environment: str) -> Popen[str]:
        return self._start(0, *self.layout.first, *arguments, **environment)

    def second(self, *arguments: object, **environment: str) -> Popen[str]:
        return self._start(1, *self.layout.second, *arguments, **environment)

    def _start(self, host: int, *arguments: object, **environment: str) -> Popen[str]:
        shared = ("--dtype", "float32", "--startup-timeout", self.patience, *self.layout.shared)
        return serve(self.hosts, host, self._folder / str(host), *shared, *arguments, **environment)

    def ends(self, host: int, process: Popen[str], status: int) -> str:
        """How a node says that it has failed, once it has; nothing of it is left."""
        assert process.wait(IN_PEACE + 30) == status, self.log(host)
        assert self.hosts.processes(host) == []
        errors = [one for one in self.log(host).splitlines() if one.startswith("Error: ")]
        assert len(errors) == 1, self.log(host)
        return errors[0].removeprefix("Error: ")

    def log(self, host: int) -> str:
        return (self._folder / str(host) / "log").read_text()


@pytest.fixture(params=[RANKS, REPLICAS], ids=["ranks", "replicas"])
def pair(request: pytest.FixtureRequest, hosts: Hosts, tmp_path: Path) -> Pair:
    return Pair(hosts, tmp_path, request.param)


@pytest.fixture
def stray(tmp_path: Path) -> str:
    """A PYTHONPATH with one plugin more."""
    metadata = tmp_path / "modules" / "stray_plugin-7.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata.parent / "stray_plugin.py").write_text('FOURFOLD_CONTRACT = ">=1.0,<2"\n')
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stray-plugin\nVersion: 7.1\n")
    (metadata / "entry_points.txt").write_text("[fourfold]\nstray = stray_plugin\n")
    return os.pathsep.join([str(metadata.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ("", "--cluster-secret has 0 characters; give 16 or more, the same on every node"),
        ("another one altogether", "has another --cluster-secret than this one"),
    ],
)
def test_a_node_without_the_secret_is_told_and_the_first_one_waits_in_vain(pair: Pair, secret: str, says: str) -> None:
    first, second = pair.first(), pair.second(FOURFOLD_CLUSTER_SECRET=secret)
    assert says in pair.ends(1, second, 2)
    assert pair.layout.absent in pair.ends(0, first, 1)


def test_a_node_with_one_plugin_more_ends_both_by_name(pair: Pair, stray: str) -> None:
    pair.patience = IN_PEACE
    first, second = pair.first(), pair.second(PYTHONPATH=stray)
    says = f"{NAME} ({ADDRESSES[1]}) has stray-plugin 7.1 as plugin 'stray'"
    assert says in pair.ends(1, second, 2)
    assert says in pair.ends(0, first, 2)


def test_a_port_that_another_process_has_is_named(pair: Pair) -> None:
    holder = pair.hosts.start(0, sys.executable, "-c", HOLDER, pair.layout.port)
    assert line(holder.stdout) == "held"
    first = pair.first()
    first.wait(IN_PEACE)
    holder.communicate()
    says = f"{pair.layout.taken}: cannot listen on tcp://{ADDRESSES[0]}:{pair.layout.port}: Address already in use"
    assert says in pair.ends(0, first, 2)


def test_a_port_that_cannot_be_reached_is_named_by_both(pair: Pair) -> None:
    pair.hosts.cut()
    first, second = pair.first(), pair.second("--node-interface", ADDRESSES[1])
    says = f"no node answers at tcp://{ADDRESSES[0]}:{pair.layout.port} within {IN_VAIN} s"
    assert says in pair.ends(1, second, 1)
    assert pair.layout.absent in pair.ends(0, first, 1)


def test_an_interface_that_is_not_there_is_refused_on_either(pair: Pair) -> None:
    first, second = (start("--node-interface", "eth7") for start in (pair.first, pair.second))
    for host, process in enumerate((first, second)):
        says = f"--node-interface is 'eth7', no interface or address of this host, which has {INTERFACE}, lo"
        assert says in pair.ends(host, process, 2)


def test_a_node_that_comes_too_late_finds_nobody(pair: Pair) -> None:
    assert pair.layout.absent in pair.ends(0, pair.first(), 1)
    assert "no node answers at " in pair.ends(1, pair.second(), 1)


def test_a_host_that_dies_while_it_loads_ends_the_start(pair: Pair) -> None:
    pair.patience = IN_PEACE
    first, second = pair.first(), pair.second()
    wait_for(lambda: "local rank" in pair.log(1), second, "it loads")
    pair.hosts.kill(1)
    assert f"{NAME} ({ADDRESSES[1]})" in pair.ends(0, first, 1)
