"""Calls to ranks on two other nodes: nodes in this process, ranks that are sockets which the test answers itself."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.errors import ConfigError, EngineError
from fourfold.manifest import fingerprint
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.secret import ClusterSecret
from fourfold.rpc.channels import Channels
from fourfold.rpc.frames import Frame, FrameReader, Kind, send_frame
from fourfold.rpc.node_ranks import NodeJoin, NodeRanks
from fourfold.rpc.rank_agent import RankAgent

DEADLINE = 10.0
SECRET = ClusterSecret("a secret of one test")
CONFIG = EngineConfig()
PLACES = {1: (2, 3), 2: (4, 5)}


class Node:
    """A node with two ranks, each of which doubles what it is sent, on a thread of its own."""

    def __init__(self, url: str, place: int, config: EngineConfig = CONFIG) -> None:
        self.lost: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.agent = RankAgent()
        join = NodeJoin(place=place, fingerprint=fingerprint(config, (), rank=PLACES[place][0]))
        self.connection = NodeConnection(
            url,
            secret=SECRET,
            node=f"node-{place}",
            body=msgspec.msgpack.encode(join),
            timeout=DEADLINE,
            on_message=self.agent.take,
            on_lost=lambda reason, planned: self.lost.put((reason, planned)),
        )
        pairs = {rank: socket.socketpair() for rank in PLACES[place]}
        self.agent.start({rank: ours for rank, (ours, _) in pairs.items()}, self.connection.send)
        self._threads = [threading.Thread(target=_double, args=(theirs,)) for _, theirs in pairs.values()]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.agent.close()
        self.connection.close("done")
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def _double(stream: socket.socket) -> None:
    reader = FrameReader(stream)
    with stream:
        try:
            while True:
                for frame in reader.read():
                    send_frame(stream, Frame(Kind.REPLY, frame.number, bytes(frame.payload) * 2))
        except (EOFError, OSError):
            return


class Engine:
    """The engine's side, with ranks 0 and 1 on its own node."""

    def __init__(self) -> None:
        self.lost: queue.Queue[tuple[int, str]] = queue.Queue()
        self.ranks = NodeRanks(
            "127.0.0.1",
            0,
            secret=SECRET,
            places=PLACES,
            fingerprint=fingerprint(CONFIG, (), rank=0),
            on_lost=lambda rank, how: self.lost.put((rank, how)),
            option="--x",
        )
        self.channels: Channels | None = None

    def open(self) -> Channels:
        pairs = {rank: socket.socketpair() for rank in (0, 1)}
        for _, theirs in pairs.values():
            threading.Thread(target=_double, args=(theirs,), daemon=True).start()
        self.channels = Channels(
            {rank: ours for rank, (ours, _) in pairs.items()},
            nodes=self.ranks.ways(lambda rank, frame: self.channels.take(rank, frame)),
            describe=str,
            on_broken=lambda error: None,
        )
        return self.channels

    def call(self, payload: bytes) -> Any:
        return self.channels.send("m", payload, timeout=DEADLINE, shape=list).wait()

    def close(self) -> None:
        if self.channels is not None:
            self.channels.close()
        self.ranks.close("over")


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.close()


@pytest.fixture
def nodes(engine: Engine) -> Iterator[list[Node]]:
    found = [Node(engine.ranks.url, place) for place in PLACES]
    engine.ranks.wait(DEADLINE)
    engine.open()
    yield found
    for node in found:
        node.close()


def test_replies_come_from_all_nodes_in_the_order_of_ranks(engine: Engine, nodes: list[Node]) -> None:
    for number in range(50):
        assert engine.call(b"%d" % number) == [b"%d" % number * 2] * 6
    assert engine.ranks.node_of(3) == "node-1"
    assert engine.ranks.node_of(0) == ""


def test_large_calls_and_replies_cross_each_other(engine: Engine, nodes: list[Node]) -> None:
    calls = [engine.channels.send("m", b"x" * (4 << 20), timeout=DEADLINE, shape=list) for _ in range(3)]
    for call in calls:
        assert [len(reply) for reply in call.wait()] == [8 << 20] * 6


def test_a_rank_that_is_lost_is_told_with_how(engine: Engine, nodes: list[Node]) -> None:
    nodes[1].agent.lose(5, "was killed by signal 9 (SIGKILL)")
    assert engine.lost.get(timeout=DEADLINE) == (5, "was killed by signal 9 (SIGKILL)")


def test_a_node_that_ends_is_named(engine: Engine, nodes: list[Node]) -> None:
    nodes[0].connection.close("was told to end")
    assert engine.lost.get(timeout=DEADLINE) == (2, "is lost with node node-1: was told to end")


def test_nodes_hear_why_the_engine_ends(engine: Engine, nodes: list[Node]) -> None:
    engine.ranks.close("rank 3 was lost")
    assert [node.lost.get(timeout=DEADLINE) for node in nodes] == [("rank 3 was lost", True)] * 2


def test_a_node_that_does_not_come_is_named_by_its_number(engine: Engine) -> None:
    node = Node(engine.ranks.url, 1)
    with pytest.raises(EngineError, match=r"no node has joined tcp://127.0.0.1:\d+ as number 2 within 0.2 s"):
        engine.ranks.wait(0.2)
    node.close()


def test_an_engine_that_fails_waits_for_no_node_any_more(engine: Engine) -> None:
    node = Node(engine.ranks.url, 1)
    threading.Timer(0.1, engine.ranks.close, ["rank 2 is lost"]).start()
    with pytest.raises(EngineError, match=r"^rank 2 is lost$"):
        engine.ranks.wait(DEADLINE)
    node.close()


def test_a_node_with_other_options_is_refused_by_key_and_name(engine: Engine) -> None:
    difference = "rank 2 on .* has model.seed = 7, and rank 0 on .* has null"
    with pytest.raises(ConfigError, match=f"refuses this one: {difference}"):
        Node(engine.ranks.url, 1, replace(CONFIG, model=ModelConfig(seed=7)))
    with pytest.raises(ConfigError, match=f"node node-1 does not fit: {difference}"):
        engine.ranks.wait(DEADLINE)
