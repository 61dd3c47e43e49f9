"""The hosts are what they claim: as far apart, as lossy and as narrow as asked, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fourfold.testing.hosts import ADDRESSES, Hosts, NoHosts
from fourfold.testing.namespaces import pids_in
from fourfold.testing.processes import still_runs

from .conftest import Make, line, wait_until

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
COUNTER = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as listener:
    listener.bind((sys.argv[1], 7000))
    listener.settimeout(20)
    print("listening", flush=True)
    count = 0
    try:
        while listener.recv(100):
            count += 1
            listener.settimeout(1)
    except TimeoutError:
        print(count, flush=True)
"""
DATAGRAMS = """
import socket, sys
while True:
    try:  # so that the way there is known before the first datagram
        socket.create_connection((sys.argv[1], 9), 10).close()
    except ConnectionRefusedError:
        break
with socket.socket(type=socket.SOCK_DGRAM) as sender:
    for _ in range(int(sys.argv[2])):
        sender.sendto(b"x", (sys.argv[1], 7000))
"""
MAKER = """
import sys, threading
from fourfold.testing.hosts import Hosts
hosts = Hosts(delay=0.001)
stays = "import threading; print('here', flush=True); threading.Event().wait(600)"
process = hosts.start(1, sys.executable, "-c", stays)
process.stdout.readline()
print(process.pid, flush=True)
threading.Event().wait(600)
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


def test_frames_get_lost_as_often_as_asked(make_hosts: Make) -> None:
    hosts = make_hosts(loss=0.2)
    counter = hosts.start(1, sys.executable, "-c", COUNTER, ADDRESSES[1])
    assert line(counter.stdout) == "listening"
    hosts.start(0, sys.executable, "-c", DATAGRAMS, ADDRESSES[1], 300)
    assert 200 < int(line(counter.stdout)) < 280


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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_hosts_end_with_the_process_that_made_them(hosts: Hosts, signum: signal.Signals) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        process = int(line(maker.stdout))
        assert process in pids_in(f"fourfold-{maker.pid}-b")
        os.killpg(maker.pid, signum)
        wait_until(lambda: f"fourfold-{maker.pid}-" not in namespaces(), "the namespaces to be removed")
        assert not still_runs(process)
        assert f"fourfold-{os.getpid()}-a" in namespaces(), "the hosts of another process"
    finally:
        maker.kill()
        maker.communicate(timeout=10)


def test_what_is_half_made_is_removed(hosts: Hosts) -> None:
    hosts.close()  # that they could be made is what counts
    with pytest.raises(NoHosts, match="cannot make hosts"):
        Hosts(rate="a little")
    assert f"fourfold-{os.getpid()}-" not in namespaces()


def test_a_machine_without_ip_has_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoHosts, match="No such file or directory: 'ip'"):
        Hosts()


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
