"""Round trip of one call over TCP to a rank on each of two other nodes, beside a floor: a bare TCP echo to both.

The nodes are processes of this host with loopback addresses of their own, so that no network is in the figure. Prints
microseconds at the median and the 99th percentile and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys

from collective_rpc import measure

from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_config import NodeConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.entries import ExecutorContext
from fourfold.nodes.secret import new_secret
from fourfold.plugins import load_plugins

NODES = 3
ADDRESS = "127.0.0.1"
ECHO = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while message := peer.recv(4096):
        peer.sendall(message)
"""


def context(place: int, secret: str, port: int) -> ExecutorContext:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=NODES),
        nodes=NodeConfig(
            nnodes=NODES,
            node_rank=place,
            headless=place > 0,
            master_address=ADDRESS,
            master_port=port,
            node_interface=f"127.0.0.{place + 1}",
            cluster_secret=secret,
        ),
    )
    return ExecutorContext(config=config, layout=config.parallel.layout, worker="fourfold.testing.workers:EchoWorker")


def follow(place: int, secret: str, port: int) -> None:
    follower = load_plugins().executors()["mp"].follow(context(place, secret, port))
    signal.signal(signal.SIGTERM, lambda *_: follower.stop())
    follower.run()


def measure_echo(count: int) -> tuple[float, float]:
    """A message over TCP to two processes and back."""
    with socket.create_server((ADDRESS, 0)) as listener:
        command = [sys.executable, "-c", ECHO, str(listener.getsockname()[1])]
        children = [subprocess.Popen(command) for _ in range(NODES - 1)]
        peers = [listener.accept()[0] for _ in children]
    message = bytes(64)
    for peer in peers:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call() -> None:
        for peer in peers:
            peer.sendall(message)
        for peer in peers:
            peer.recv(4096)

    try:
        return measure(call, count)
    finally:
        for peer, child in zip(peers, children, strict=True):
            peer.close()
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--port", type=int, default=29591)
    parser.add_argument("--follow", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(arguments.follow, os.environ["BENCHMARK_SECRET"], arguments.port)
        return
    floor = measure_echo(arguments.count)
    secret = new_secret()
    command = [sys.executable, __file__, "--port", str(arguments.port), "--follow"]
    environment = {**os.environ, "BENCHMARK_SECRET": secret}
    nodes = [subprocess.Popen([*command, str(place)], env=environment) for place in range(1, NODES)]
    executor = load_plugins().executors()["mp"].build(context(0, secret, arguments.port))
    try:
        step = bytes(64)
        rows = {
            "bare TCP echo": floor,
            "collective_rpc": measure(lambda: executor.collective_rpc("identity", args=(step,)), arguments.count),
            "one rank replies": measure(
                lambda: executor.collective_rpc("identity", args=(step,), reply_rank=1), arguments.count
            ),
        }
    finally:
        executor.shutdown()
        for node in nodes:
            node.terminate()
            node.wait()
    print(f"{NODES} nodes of one rank, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, (median, tail) in rows.items():
        print(f"{name:18} p50 {median:7.0f} us   p99 {tail:7.0f} us   {median / floor[0]:5.2f}x the floor")


if __name__ == "__main__":
    main()
