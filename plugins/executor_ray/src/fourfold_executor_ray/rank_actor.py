"""One rank, inside of a Ray actor: it connects to the executor and serves calls until that hangs up."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
from dataclasses import replace
from typing import Final

import msgspec

from fourfold.errors import EngineError
from fourfold.rpc.frames import Frame, Kind, send_frame
from fourfold.rpc.rank_executor import ROLE
from fourfold.rpc.rank_server import RankServer, Seat
from fourfold.supervision.process_title import name_process
from fourfold_executor_ray.door import enter
from fourfold_executor_ray.environment import apply_variables, forget_reserved_threads
from fourfold_executor_ray.messages import Arrival, NodeOrders, RankOrders
from fourfold_executor_ray.node_gate import NodeGate

logger = logging.getLogger(__name__)

_PATIENCE: Final = 2.5
"""Seconds for a rank to end by itself after the executor has hung up or died; an orphan may stay for 5."""
_CONNECT_TIMEOUT: Final = 10.0


class RankActor:
    """Lives in a process of its own, on the node that Ray gave it."""

    def __init__(self) -> None:
        self._gate: NodeGate | None = None

    def open_gate(self, encoded: bytes) -> str:
        """Connect this node as these NodeOrders say; the door that its ranks come in by."""
        self._gate = NodeGate(msgspec.msgpack.decode(encoded, type=NodeOrders))
        return self._gate.door

    def serve(self, encoded: bytes, door: str) -> str:
        """Be the rank of these RankOrders until the executor hangs up.

        ``door`` is the name of the ``Door`` that leads there. Returns why it ended; empty if the executor did hang up.
        """
        import ray

        orders = msgspec.msgpack.decode(encoded, type=RankOrders)
        forget_reserved_threads(os.environ)
        apply_variables(orders.variables, os.environ)
        place = f"{orders.label} {orders.node}"
        name_process(ROLE, place, log_level=orders.log_level)
        ray._raylet.setproctitle(f"fourfold {ROLE} {place}")  # Ray has set one, and nobody else can change it now
        with _connect(door, orders) as stream:
            send_frame(stream, Frame(Kind.REPLY, 0, msgspec.msgpack.encode(Arrival(rank=orders.rank))))
            server = RankServer(stream, replace(_seat(orders), local_rank=_device(orders.local_rank)))
            done = threading.Event()
            threading.Thread(target=_watch, args=(stream, server, done), name="executor-watch", daemon=True).start()
            try:
                server.run()
            except SystemExit as error:  # a worker method that ends its process
                return f"exited with code {error.code or 0}"
            finally:
                done.set()
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
        return ""


def _connect(door: str, orders: RankOrders) -> socket.socket:
    try:
        return enter(door, _CONNECT_TIMEOUT)
    except OSError as error:
        raise EngineError(f"node {orders.node} cannot come in by the door {door}: {error}") from error


def _seat(orders: RankOrders) -> Seat:
    return Seat(
        rank=orders.rank,
        local_rank=orders.local_rank,
        local_workers=orders.local_workers,
        node=orders.node,
        address=orders.address,
    )


def _device(local_rank: int) -> int:
    """Which of the node's devices is the rank's: the one that Ray has assigned."""
    import ray

    assigned = [int(one) for one in ray.get_gpu_ids() if str(one).isdigit()]
    if not assigned:
        return local_rank
    # All devices stay visible, as they must for ranks that map each other's memory.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return assigned[0]


def _watch(stream: socket.socket, server: RankServer, done: threading.Event) -> None:
    """End this process after the executor has hung up, even if the rank is in a call that never returns."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # closed: the rank has ended
        poll.register(stream, select.POLLRDHUP)
        poll.poll()
    server.stop()
    if not done.wait(_PATIENCE):
        os._exit(1)
