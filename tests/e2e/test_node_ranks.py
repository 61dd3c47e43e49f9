"""One engine over two nodes, which are serve processes with loopback addresses of their own."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.plugins import load_plugins
from fourfold.testing.golden import CHATS, COMPLETIONS

from .conftest import Start
from .running_server import Server, chat, wait_until
from .test_golden import answer
from .test_lifecycle import completion, stream, wait_until_gone
from .test_nodes import NODE, SECRET, everything, wait_for_log

Pair = Callable[..., tuple[Server, Callable[[], Server]]]

_numbers = itertools.count(1)


@pytest.fixture
def pair(start: Start) -> Pair:
    """Starts the node with the engine; the function starts the other one."""

    def start_pair(*arguments: str, **options: object) -> tuple[Server, Callable[[], Server]]:
        address = f"127.{os.getpid() % 250 + 1}.{next(_numbers)}.2"
        layout = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--nnodes", "2")
        shared = (*layout, "--master-address", address, "--num-blocks", "600", *arguments)
        given = {"ready": False, "environment": SECRET, **options}
        follower = ("--headless", "--node-rank", "1", "--node-interface", NODE)
        return start(*shared, **given), lambda: start(*shared, *follower, **given)

    return start_pair


def test_two_stages_on_two_nodes_say_what_one_rank_says(pair: Pair) -> None:
    embedded = Path(resolve_checkpoint(ModelConfig(), load_plugins(), NoProgress()).folder)
    first, start_second = pair("--max-model-len", "512", model=embedded, load_format="auto")
    second = start_second()
    first.wait_until_ready()
    with first.client() as client:
        topology = client.get("/topology").json()
    assert [(row["role"], row["replicas"]) for row in topology["nodes"]] == [("head", [0]), ("ranks", [0])]
    labels = [row["label"] for row in topology["processes"] if NODE in row.get("node", "")]
    assert labels == ["DP0.PP1.TP0", "DP0.PP1.TP1"]
    for group, communicator in (("tp of rank(s) [0, 1]", "shm"), ("pp of rank(s) [0, 2]", "gloo")):
        assert f"group {group}: communicator '{communicator}'" in first.log
    for prompt, _, max_tokens, expected in COMPLETIONS.values():
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        assert answer(first, "/v1/completions", body)[0] == expected
    for prompt, _, max_tokens, expected in CHATS.values():
        body = {"model": "tiny", **chat(prompt, max_tokens=max_tokens)}
        assert answer(first, "/v1/chat/completions", body)[0] == expected
    left = everything(first, second)
    first.signal(signal.SIGTERM)
    assert first.wait(30) == 0
    assert second.wait(30) == 0
    wait_until_gone(left)


def test_a_rank_or_a_node_that_is_lost_is_named_and_the_engine_comes_back(pair: Pair) -> None:
    first, start_second = pair()
    second = start_second()
    first.wait_until_ready()
    opened = stream(first, completion(4000), until=3)
    rank = next(process for process in second.descendants() if "PP1.TP1" in " ".join(process.cmdline()))
    rank.kill()
    opened.join()
    assert f"rank 3 on {os.uname().nodename} ({NODE}) was killed by signal 9 (SIGKILL)" in opened.error["message"]
    wait_until(lambda: first.status("/readyz") == 200, 90, "the engine with the other node's ranks")

    lost = everything(second)
    second.signal(signal.SIGKILL)
    wait_until_gone(lost)
    wait_for_log(first, f"is lost with node {os.uname().nodename} ({NODE}): its connection has ended")
    again = start_second()
    wait_until(lambda: first.status("/readyz") == 200, 90, "the engine with a new node's ranks")

    left = [psutil.Process(process.pid) for process in everything(first, again)]
    first.signal(signal.SIGKILL)
    first.wait(10)
    again.signal(signal.SIGTERM)
    assert again.wait(30) == 0
    wait_until_gone(left)
