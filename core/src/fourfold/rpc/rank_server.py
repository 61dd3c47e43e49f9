"""Runs an executor's calls on one rank, in their order, on one thread. Knows the worker by its methods' names only.

Replies that the worker defers are waited for on a second thread, so that the next call can begin.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Final

import msgspec

from fourfold.config.transport import decode_config
from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.entries import WorkerContext
from fourfold.errors import EngineError
from fourfold.manifest import fingerprint
from fourfold.nodes.addresses import tcp_url
from fourfold.plugins import load_plugins
from fourfold.rpc.frames import Frame, FrameReader, Kind, send_frame
from fourfold.rpc.start_message import CONSTRUCTION, DISCOVERY, Introduction, StartMessage
from fourfold.rpc_call import report_error, start_call
from fourfold.serialization import decode

logger = logging.getLogger(__name__)

_MEETING_BACKLOG: Final = 1024
_CLOSE_SECONDS: Final = 1.0
"""For steps that are still on a device when the rank ends; the executor's patience is 2 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Which rank a process is, and where; the fields are those of a WorkerContext."""

    rank: int
    local_rank: int
    local_workers: int = 0
    node: str = ""
    address: str = ""


class RankServer:
    """One rank. The first call finds its plugins, the second builds its worker, all others are the worker's."""

    def __init__(self, stream: socket.socket, seat: Seat) -> None:
        """``stream`` leads to the executor."""
        stream.set_inheritable(False)
        self._stream = stream
        self._seat = seat
        self._rank = seat.rank
        self._rendezvous = ""
        self._meeting: socket.socket | None = None
        """Where this rank hosts the place that ranks meet in, until the store takes it over."""
        self._hosted: Any = None
        """That store."""
        self._context: WorkerContext | None = None
        self._start: StartMessage | None = None
        self._worker: Any = None
        self._stopping = False
        self._sending = threading.Lock()
        self._deferred: DeferredReplies | None = None

    def run(self) -> None:
        """Serve until ``stop`` or until the executor closes the stream; then let the worker go."""
        try:
            for frame in self._calls():
                self._serve(frame)
        finally:
            if self._deferred is not None:
                self._deferred.close()
            self._end_worker()

    def stop(self) -> None:
        """Let ``run`` return after the call that it is in. From any thread."""
        self._stopping = True
        with contextlib.suppress(OSError):  # the executor has closed it
            self._stream.shutdown(socket.SHUT_RD)

    def _calls(self) -> Iterator[Frame]:
        reader = FrameReader(self._stream)
        while True:
            try:
                frames = reader.read()
            except (EOFError, ConnectionError):
                return
            for frame in frames:
                if self._stopping:
                    return
                yield frame

    def _serve(self, frame: Frame) -> None:
        number = frame.number
        answer: Frame | None
        try:
            if number == 0:
                answer = Frame(Kind.REPLY, number, self._discover(frame.payload))
            elif number == 1:
                self._rendezvous = bytes(frame.payload).decode()
                self._build_worker()
                answer = Frame(Kind.DONE, number, b"")
            else:
                answer = self._run(frame)
        except Exception as error:
            answer = Frame(Kind.ERROR, number, report_error(error, self._phase(frame)))
        if answer is not None:
            self._send(answer)

    def _send(self, answer: Frame) -> None:
        with self._sending, contextlib.suppress(ConnectionError):  # an executor that has gone ends this process itself
            send_frame(self._stream, answer)

    def _discover(self, payload: bytes | bytearray) -> bytes:
        registry = load_plugins()
        start = msgspec.msgpack.decode(payload, type=StartMessage)
        config = decode_config(start.config, registry)
        several = start.layout.engine_world_size > 1
        self._start = start
        self._context = WorkerContext(
            config=config,
            layout=start.layout,
            rank=self._rank,
            local_rank=self._seat.local_rank,
            local_workers=self._seat.local_workers,
            node=self._seat.node,
            address=self._seat.address,
            dp_rank=start.dp_rank,
            open_store=self._open_store if several else None,
        )
        found = fingerprint(config, registry.manifest, rank=self._rank)
        hosts = start.several_nodes and self._rank == 0
        return msgspec.msgpack.encode(Introduction(fingerprint=found, rendezvous=self._open_meeting() if hosts else ""))

    def _open_meeting(self) -> str:
        address = self._seat.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Bound for good, so that nobody can take the port before the store is there.
        self._meeting = socket.create_server((address, 0), family=family, backlog=_MEETING_BACKLOG)
        return tcp_url(address, self._meeting.getsockname()[1])

    def _open_store(self) -> Any:
        # Here, so that a rank without a model needs no torch.
        from fourfold.distributed.store import host_store, open_store

        start = self._checked_start()
        if self._meeting is not None:
            listener, self._meeting = self._meeting, None
            self._hosted = host_store(listener, timeout=start.store_timeout)
        if self._hosted is not None:
            return self._hosted
        world_size = start.layout.engine_world_size
        return open_store(self._rendezvous, world_size=world_size, timeout=start.store_timeout)

    def _build_worker(self) -> None:
        self._worker = resolve_name(self._checked_start().worker)(self._context)

    def _checked_start(self) -> StartMessage:
        if self._start is None:
            raise EngineError(f"{CONSTRUCTION} came before {DISCOVERY}")
        return self._start

    def _run(self, frame: Frame) -> Frame | None:
        """The answer to a call; None when it is sent later."""
        reply = start_call(self._worker, frame.payload, rank=self._rank)
        if not isinstance(reply, DeferredReply):
            return _answer(frame.number, reply)
        if self._deferred is None:
            self._deferred = DeferredReplies(self._send)
        phase = self._phase(frame)

        def finish() -> Frame:
            try:
                return _answer(frame.number, reply.take())
            except Exception as error:
                return Frame(Kind.ERROR, frame.number, report_error(error, phase))

        self._deferred.put(finish)
        return None

    def _phase(self, frame: Frame) -> str:
        if frame.number < 2:
            return (DISCOVERY, CONSTRUCTION)[frame.number]
        name: str = decode(frame.payload)[0]
        return name

    def _end_worker(self) -> None:
        end = getattr(self._worker, "shutdown", None)
        if end is None:
            return
        try:
            end()
        except Exception:  # a worker that ends badly must not keep the rank from ending
            logger.exception("the worker failed in shutdown")


class DeferredReplies:
    """Makes answers on a thread of its own, in order, and sends them."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._waiting: queue.SimpleQueue[Callable[[], Frame] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deferred-replies", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], Frame]) -> None:
        """Send what ``make`` returns, after those before it."""
        self._waiting.put(make)

    def close(self) -> None:
        """Send what is waiting, and end; after a deadline without."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (make := self._waiting.get()) is not None:
            self._send(make())


def _answer(number: int, reply: bytes | None) -> Frame:
    return Frame(Kind.DONE, number, b"") if reply is None else Frame(Kind.REPLY, number, reply)
