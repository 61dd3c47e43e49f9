from __future__ import annotations

import queue
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fourfold.errors import EngineError
from fourfold_server.acceptor import Acceptor, receive_connection

DEADLINE = 10.0


class Harness:
    """Takers that answer with their number."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.own: queue.Queue[socket.socket] = queue.Queue()
        self.acceptor = Acceptor(self.listener, self.own.put)
        stack.callback(self.acceptor.close)
        self.channels: dict[int, socket.socket] = {}

    def add(self, index: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stack.enter_context(ours)
        self.channels[index] = self.stack.enter_context(theirs)
        self.acceptor.add(index, ours)

    def connect(self, count: int) -> None:
        for _ in range(count):
            self.stack.enter_context(socket.create_connection(self.listener.getsockname()))

    def taken(self, count: int) -> Counter[int]:
        """Who got the next ``count`` connections."""
        found: Counter[int] = Counter()
        deadline = time.monotonic() + DEADLINE
        while found.total() < count:
            assert time.monotonic() < deadline
            try:
                self.stack.enter_context(self.own.get(timeout=0.01))
                found[0] += 1
            except queue.Empty:
                pass
            for index, channel in self.channels.items():
                while select.select([channel], [], [], 0)[0]:
                    connection = receive_connection(channel)
                    assert connection is not None
                    self.stack.enter_context(connection)
                    found[index] += 1
        return found


@pytest.fixture
def harness() -> Iterator[Harness]:
    with ExitStack() as stack:
        yield Harness(stack)


def test_everyone_gets_the_same_number(harness: Harness) -> None:
    for index in (1, 2, 3):
        harness.add(index)
    harness.acceptor.start()
    harness.connect(40)
    assert harness.taken(40) == {0: 10, 1: 10, 2: 10, 3: 10}


def test_who_has_gone_gets_nothing(harness: Harness) -> None:
    for index in (1, 2):
        harness.add(index)
    harness.acceptor.start()
    harness.acceptor.remove(1)
    harness.acceptor.remove(1)
    harness.connect(8)
    assert harness.taken(8) == {0: 4, 2: 4}
    harness.channels.pop(2).close()  # it has died, and nobody has said so yet
    harness.connect(3)
    assert harness.taken(3) == {0: 3}
    harness.acceptor.remove_all()
    harness.connect(2)
    assert harness.taken(2) == {0: 2}


def test_the_receiver_hears_of_the_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.setblocking(False)
        assert receive_connection(theirs) is None
        ours.close()
        with pytest.raises(EngineError, match="has gone"):
            receive_connection(theirs)
