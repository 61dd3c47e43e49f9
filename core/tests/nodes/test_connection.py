"""Two nodes in one process: who is let in, what is said, and who is noticed to have gone."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from fourfold.errors import ConfigError, EngineError
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.listener import NodeListener
from fourfold.nodes.secret import ClusterSecret, new_secret

DEADLINE = 10.0
SECRET = ClusterSecret("a secret of one test")


class Head:
    """A listener that writes down what it hears."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.listener = NodeListener(
            address,
            secret=SECRET,
            admit=self.admit,
            on_message=lambda node, content: self.heard.put((node, content)),
            on_lost=lambda node, reason, planned: self.heard.put((node, reason, planned)),
        )

    def admit(self, node: str, body: bytes) -> bytes:
        if body == b"odd":
            raise ConfigError("model.dtype differs")
        return b"welcome " + body

    def next(self) -> tuple[Any, ...]:
        return self.heard.get(timeout=DEADLINE)


@pytest.fixture
def head() -> Iterator[Head]:
    found = Head()
    yield found
    found.listener.close("over")


@contextmanager
def joined(url: str, node: str = "b", **options: Any) -> Iterator[tuple[NodeConnection, queue.Queue[Any]]]:
    heard: queue.Queue[Any] = queue.Queue()
    settings: dict[str, Any] = {"secret": SECRET, "body": b"b", "timeout": DEADLINE, **options}
    connection = NodeConnection(
        url, node=node, on_message=heard.put, on_lost=lambda reason, planned: heard.put((reason, planned)), **settings
    )
    try:
        yield connection, heard
    finally:
        connection.close("done")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_both_sides_hear_each_other_in_order(address: str) -> None:
    head = Head(address)
    try:
        with joined(head.listener.url) as (connection, heard):
            assert connection.welcome == b"welcome b"
            for number in range(100):
                assert connection.send(b"%d" % number)
                assert head.listener.send("b", b"%d" % number)
            assert [head.next() for _ in range(100)] == [("b", b"%d" % n) for n in range(100)]
            assert [heard.get(timeout=DEADLINE) for _ in range(100)] == [b"%d" % n for n in range(100)]
            assert not head.listener.send("c", b"nobody")
        assert head.next() == ("b", "done", True)
    finally:
        head.listener.close("over")


def test_a_large_message_arrives_whole(head: Head) -> None:
    content = bytes(range(256)) * (1 << 16)
    with joined(head.listener.url) as (connection, _):
        connection.send(content)
        assert head.next() == ("b", content)


def test_another_secret_is_refused_at_once(head: Head) -> None:
    started = time.monotonic()
    with (
        pytest.raises(ConfigError, match="another --cluster-secret"),
        joined(head.listener.url, secret=ClusterSecret(new_secret())),
    ):
        pass
    assert time.monotonic() - started < 5
    assert "b" not in head.listener


def test_nobody_gets_in_without_a_secret(head: Head) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(head.listener.url)
        plain.send_multipart([b"\1", b""])
        assert not plain.poll(300)
    with joined(head.listener.url):  # and the listener goes on
        pass


def test_a_node_that_does_not_fit_is_told_why(head: Head) -> None:
    reason = f"the node at {head.listener.url} refuses this one: model.dtype differs"
    with pytest.raises(ConfigError, match=reason), joined(head.listener.url, body=b"odd"):
        pass


def test_a_name_is_given_once(head: Head) -> None:
    namesake = pytest.raises(ConfigError, match="a node of this name is connected already")
    with joined(head.listener.url), namesake, joined(head.listener.url):
        pass
    assert head.next() == ("b", "done", True)
    with joined(head.listener.url):
        pass


def test_nobody_at_the_address_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no node answers at {url} within 0.3 s"), joined(url, timeout=0.3):
            pass


def test_a_port_that_is_taken_is_named(head: Head) -> None:
    with pytest.raises(ConfigError, match=f"--here: cannot listen on {head.listener.url}: Address already in use"):
        NodeListener(
            "127.0.0.1",
            head.listener.port,
            secret=SECRET,
            admit=head.admit,
            on_message=lambda *_: None,
            on_lost=lambda *_: None,
            option="--here",
        )


def test_a_node_hears_that_the_listener_ends(head: Head) -> None:
    with joined(head.listener.url) as (connection, heard):
        head.listener.close("shutting down")
        assert heard.get(timeout=DEADLINE) == ("shutting down", True)
        assert not connection.send(b"x")


NODE = """
import sys, threading
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.secret import ClusterSecret
NodeConnection(sys.argv[1], secret=ClusterSecret("a secret of one test"), node="b", body=b"", timeout=20,
    on_message=print, on_lost=print).send(b"here")
threading.Event().wait(30)
"""


@pytest.mark.parametrize(("signum", "reason", "within"), [(9, "ended", 2.0), (19, "no sign of life for 4 s", 6.0)])
def test_a_node_that_is_killed_or_stopped_is_noticed(head: Head, signum: int, reason: str, within: float) -> None:
    child = subprocess.Popen([sys.executable, "-c", NODE, head.listener.url])
    try:
        assert head.next() == ("b", b"here")
        started = time.monotonic()
        child.send_signal(signum)
        node, found, planned = head.next()
        assert (node, planned) == ("b", False)
        assert reason in found
        assert time.monotonic() - started < within
    finally:
        child.kill()
        child.wait()


def test_a_node_that_was_given_up_hears_of_it(head: Head) -> None:
    with joined(head.listener.url) as (connection, heard):
        head.listener._lose(head.listener._nodes["b"], "silent")
        assert head.next() == ("b", "silent", False)
        connection.send(b"late")
        reason, planned = heard.get(timeout=DEADLINE)
        assert "this node was given up before" in reason
        assert not planned


def test_a_secret_is_never_shown() -> None:
    assert "one test" not in repr(SECRET)
    with pytest.raises(ConfigError, match="has 5 characters; give 16 or more") as error:
        ClusterSecret("short")
    assert "short" not in str(error.value)
