"""Nodes of our own on two hosts: ranks of one engine and replicas of one deployment, near, far, and lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.testing.hosts import ADDRESSES, INTERFACE, Hosts

from .conftest import Make, answers, ask, serve
from .golden import BODIES, LONG, TEXTS

pytestmark = pytest.mark.multihost

SHARED = ("--dtype", "float32", "--max-model-len", "512", "--num-blocks", "200")


def start_ranks(hosts: Hosts, folder: Path, *, tp: int = 2, pp: int = 2) -> None:
    """One engine, half of its ranks on each host."""
    layout = ("--tensor-parallel-size", tp, "--pipeline-parallel-size", pp, "--nnodes", 2)
    shared = (*SHARED, *layout, "--master-address", ADDRESSES[0])
    serve(hosts, 0, folder / "a", *shared)
    serve(hosts, 1, folder / "b", *shared, "--headless", "--node-rank", 1, "--node-interface", INTERFACE)


def test_two_stages_on_two_hosts_and_a_lost_host_is_named(tmp_path: Path, hosts: Hosts) -> None:
    start_ranks(hosts, tmp_path)
    assert [answer["text"] for answer in answers(ask(hosts, *BODIES))] == TEXTS
    client = ask(hosts, {**LONG, "prompt": "a", "max_tokens": 400})
    hosts.cut()
    (lost,) = answers(client)
    assert "rank 2 is lost with node " in lost["error"]
    assert f"({ADDRESSES[1]}): it has given no sign of life for 4 s" in lost["error"]
    assert lost["seconds"] < 6.0  # one step, and 5 s


def test_hosts_that_are_far_apart_and_lose_frames_say_the_same(tmp_path: Path, make_hosts: Make) -> None:
    hosts = make_hosts(delay=0.002, loss=0.005, rate="200mbit")
    print(f"a round trip takes {1e3 * hosts.round_trip():.2f} ms")
    start_ranks(hosts, tmp_path)
    assert [answer["text"] for answer in answers(ask(hosts, *BODIES))] == TEXTS


def test_a_stage_over_two_hosts_adds_up_inside_each_first(tmp_path: Path, hosts: Hosts) -> None:
    start_ranks(hosts, tmp_path, tp=4, pp=1)
    assert [answer["text"] for answer in answers(ask(hosts, *BODIES))] == TEXTS
    assert "group tp of rank(s) [0, 1, 2, 3]: communicator 'shm-gloo'" in (tmp_path / "a" / "log").read_text()


@pytest.mark.parametrize("loss", ["cut", "kill"])
def test_streams_go_on_without_the_host_of_their_replica(tmp_path: Path, hosts: Hosts, loss: str) -> None:
    shared = (*SHARED, "--data-parallel-size", 2, "--data-parallel-address", ADDRESSES[0])
    serve(hosts, 0, tmp_path / "a", *shared, "--data-parallel-size-local", 1, "--api-server-count", 1)
    serve(hosts, 1, tmp_path / "b", *shared, "--headless", "--data-parallel-start-rank", 1)
    bodies = [{**LONG, "prompt": prompt, "seed": number} for number, prompt in enumerate("abcd")]
    undisturbed = answers(ask(hosts, *bodies))
    client = ask(hosts, *bodies)
    hosts.cut() if loss == "cut" else hosts.kill(1)
    assert answers(client) == undisturbed
    assert all(answer["error"] is None for answer in undisturbed)
