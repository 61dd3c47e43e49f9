"""Where ranks come in: by name, for processes of one user, and without a file."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from fourfold.rpc.frames import Frame, Kind, send_frame
from fourfold_executor_ray.door import Door, enter, peer_pids
from fourfold_executor_ray.messages import Arrival

DEADLINE = 10.0


@pytest.fixture
def arrived() -> queue.Queue[dict[int, socket.socket]]:
    return queue.Queue()


@pytest.fixture
def door(arrived: queue.Queue[dict[int, socket.socket]]) -> Iterator[Door]:
    found = Door([0, 1], arrived.put)
    yield found
    found.close()


def come(door: Door, rank: int) -> socket.socket:
    stream = enter(door.name, DEADLINE)
    send_frame(stream, Frame(Kind.REPLY, 0, msgspec.msgpack.encode(Arrival(rank=rank))))
    return stream


def test_all_ranks_are_handed_over_and_strangers_are_not(
    door: Door, arrived: queue.Queue[dict[int, socket.socket]]
) -> None:
    with enter(door.name, DEADLINE) as stranger:
        stranger.sendall(b"\xff" * 64)
        with come(door, 1) as one, come(door, 0) as other:
            streams = arrived.get(timeout=DEADLINE)
            assert peer_pids(streams) == {0: os.getpid(), 1: os.getpid()}
            streams[0].sendall(b"x")
            assert other.recv(1) == b"x"
            assert one.getpeername() == f"\0{door.name}".encode()
        for stream in streams.values():
            stream.close()
    with pytest.raises(ConnectionRefusedError):
        enter(door.name, DEADLINE)


@pytest.mark.skipif(os.getuid() != 0, reason="only root is several users")
def test_another_user_is_sent_away(door: Door) -> None:
    code = (
        "import os, socket\n"
        "os.setuid(65534)\n"
        "stream = socket.socket(socket.AF_UNIX)\n"
        f"stream.connect({chr(0) + door.name!r})\n"
        f"stream.settimeout({DEADLINE})\n"
        "assert stream.recv(1) == b''\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=DEADLINE)
    assert not door.has_let_in(0)


def test_a_closed_door_lets_nobody_in(door: Door) -> None:
    with come(door, 0) as stream:
        door.close()
        stream.settimeout(DEADLINE)
        assert stream.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        enter(door.name, DEADLINE)
