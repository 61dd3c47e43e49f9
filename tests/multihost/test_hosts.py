"""The hosts are what they claim: as far apart, as lossy and as narrow as asked, and gone afterwards."""

from __future__ import annotations

import sys
import time

import pytest

from fourfold.testing.hosts import ADDRESSES, Hosts

from .conftest import Make, line

pytestmark = pytest.mark.multihost

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listening", flush=True)
    peer, _ = listener.accept()
    length = 0
    while piece := peer.recv(1 << 16):
        length += len(piece)
    print(length, flush=True)
"""
CLIENT = """
import socket, sys
socket.create_connection((sys.argv[1], 7000), 10).sendall(bytes(int(sys.argv[2])))
"""


def seconds_to_send(hosts: Hosts, length: int) -> float:
    """Bytes over TCP from host 0 to host 1."""
    server = hosts.start(1, sys.executable, "-c", SERVER, ADDRESSES[1])
    assert line(server.stdout) == "listening"
    start = time.monotonic()
    hosts.start(0, sys.executable, "-c", CLIENT, ADDRESSES[1], length)
    assert line(server.stdout) == str(length)
    return time.monotonic() - start


@pytest.mark.parametrize("milliseconds", [0, 1, 20])
def test_the_round_trip_is_twice_the_delay(make_hosts: Make, milliseconds: int) -> None:
    found = 1e3 * make_hosts(delay=milliseconds / 1e3).round_trip()
    print(f"{milliseconds} ms each way: a round trip of {found:.2f} ms")
    assert 2 * milliseconds <= found < 2 * milliseconds + 10


def test_everything_arrives_over_a_cable_that_loses_frames(make_hosts: Make) -> None:
    seconds_to_send(make_hosts(delay=0.0002, loss=0.05), 1 << 20)


def test_no_more_passes_than_the_rate(make_hosts: Make) -> None:
    assert seconds_to_send(make_hosts(rate="20mbit"), 2_500_000) > 0.6  # 1 s, less a burst


def test_the_cable_can_be_cut_and_mended(hosts: Hosts) -> None:
    hosts.cut()
    with pytest.raises(ConnectionError, match="nothing comes back"):
        hosts.round_trip()
    hosts.mend()
    assert hosts.round_trip() < 1


def test_a_killed_host_has_no_process_left(hosts: Hosts) -> None:
    process = hosts.start(1, sys.executable, "-c", "print('here', flush=True); input()")
    assert line(process.stdout) == "here"
    assert hosts.processes(1)
    hosts.kill(1)
    assert hosts.processes(1) == []
