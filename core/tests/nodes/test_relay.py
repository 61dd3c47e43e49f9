"""Two run directories with a relay each: a socket of one stands for that of the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from fourfold.addresses import socket_address
from fourfold.nodes.relay import Relay

DEADLINE = 5000


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="a-") as here, tempfile.TemporaryDirectory(prefix="b-") as there:
        yield Path(here), Path(there)


@pytest.fixture
def relays(folders: tuple[Path, Path]) -> Iterator[tuple[Relay, Relay]]:
    there = Relay(folders[1], lambda name, message: None)
    here = Relay(folders[0], there.deliver)
    yield here, there
    here.close()
    there.close()


def test_messages_reach_the_socket_of_the_same_name_in_order(
    folders: tuple[Path, Path], relays: tuple[Relay, Relay]
) -> None:
    relays[0].open_inlet("api-0")
    relays[1].open_outlet("api-0")
    with zmq.Context() as context, context.socket(zmq.PULL) as owner, context.socket(zmq.PUSH) as sender:
        owner.bind(socket_address(folders[1], "api-0"))
        sender.connect(socket_address(folders[0], "api-0"))
        for number in range(500):
            sender.send(b"%d" % number)
        for number in range(500):
            assert owner.poll(DEADLINE)
            assert owner.recv() == b"%d" % number


def test_what_waits_for_an_owner_that_has_gone_reaches_none_after_it(
    folders: tuple[Path, Path], relays: tuple[Relay, Relay]
) -> None:
    there = relays[1]
    there.open_outlet("api-0")
    there.deliver("api-0", b"for the first")
    there.deliver("unknown", b"for nobody")
    there.open_outlet("api-0")
    there.deliver("api-0", b"for the second")
    with zmq.Context() as context, context.socket(zmq.PULL) as owner:
        owner.bind(socket_address(folders[1], "api-0"))
        assert owner.poll(DEADLINE)
        assert owner.recv() == b"for the second"
        assert not owner.poll(50)
