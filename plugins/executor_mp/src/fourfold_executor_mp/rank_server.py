"""Runs an executor's calls on one rank, in their order, on one thread. Knows the worker by its methods' names only."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import msgspec

from fourfold.config.transport import decode_config
from fourfold.entries import WorkerContext
from fourfold.errors import EngineError
from fourfold.manifest import fingerprint
from fourfold.plugins import load_plugins
from fourfold.rpc_call import report_error, run_call
from fourfold.serialization import decode
from fourfold_executor_mp.frames import Frame, FrameReader, Kind, send_frame
from fourfold_executor_mp.start_message import CONSTRUCTION, DISCOVERY, StartMessage

logger = logging.getLogger(__name__)


class RankServer:
    """One rank. The first call finds its plugins, the second builds its worker, all others are the worker's."""

    def __init__(self, stream: socket.socket, *, rank: int, local_rank: int, rendezvous: int) -> None:
        """``stream`` leads to the executor, ``rendezvous`` is the descriptor of the ranks' meeting place."""
        stream.set_inheritable(False)
        self._stream = stream
        self._rank = rank
        self._local_rank = local_rank
        self._rendezvous = rendezvous
        self._context: WorkerContext | None = None
        self._start: StartMessage | None = None
        self._worker: Any = None
        self._stopping = False

    def run(self) -> None:
        """Serve until ``stop`` or until the executor closes the stream; then let the worker go."""
        try:
            for frame in self._calls():
                self._serve(frame)
        finally:
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
        try:
            if number == 0:
                answer = Frame(Kind.REPLY, number, self._discover(frame.payload))
            elif number == 1:
                self._build_worker()
                answer = Frame(Kind.DONE, number, b"")
            else:
                answer = self._run(frame)
        except Exception as error:
            answer = Frame(Kind.ERROR, number, report_error(error, self._phase(frame)))
        with contextlib.suppress(ConnectionError):  # an executor that has gone ends this process in its own way
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
            local_rank=self._local_rank,
            dp_rank=start.dp_rank,
            open_store=self._open_store if several else None,
        )
        return msgspec.msgpack.encode(fingerprint(config, registry.manifest, rank=self._rank))

    def _open_store(self) -> Any:
        # Here, so that a rank without a model needs no torch.
        from fourfold.distributed.store import open_store

        start = self._checked_start()
        # By its path, so that every rank has an open file of its own: locks belong to open files.
        url = f"file:///proc/self/fd/{self._rendezvous}"
        return open_store(url, world_size=start.layout.engine_world_size, timeout=start.store_timeout)

    def _build_worker(self) -> None:
        self._worker = resolve_name(self._checked_start().worker)(self._context)

    def _checked_start(self) -> StartMessage:
        if self._start is None:
            raise EngineError(f"{CONSTRUCTION} came before {DISCOVERY}")
        return self._start

    def _run(self, frame: Frame) -> Frame:
        reply = run_call(self._worker, frame.payload, rank=self._rank)
        return Frame(Kind.DONE, frame.number, b"") if reply is None else Frame(Kind.REPLY, frame.number, reply)

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
