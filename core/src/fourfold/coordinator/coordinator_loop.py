"""The coordinator's sockets: engines report whenever they like, API servers hear at most every 100 ms."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec
import zmq

from fourfold.addresses import api_address, coordinator_address, wave_address
from fourfold.coordinator.load_board import LoadBoard
from fourfold.coordinator.waves import CoordinatorNotice, RankInput, WaveCoordinator
from fourfold.messages import CoordinatorInput, EngineReport, JoinReports, LoadReports

logger = logging.getLogger(__name__)

INTERVAL = 0.1
"""Seconds between two publications, if there is anything new."""
_MAX_UNSENT = 64
"""Messages that may wait for an API server that reads none; more are dropped, and said again later."""


class CoordinatorLoop:
    """``run`` returns after ``stop``, which any thread may call."""

    def __init__(self, run_directory: Path, *, num_engines: int, num_clients: int) -> None:
        self._board = LoadBoard(num_engines, num_clients)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.bind(coordinator_address(run_directory))
        self._clients = []
        for client in range(num_clients):
            outlet = self._context.socket(zmq.PUSH)
            outlet.set_hwm(_MAX_UNSENT)
            outlet.connect(api_address(run_directory, client))
            self._clients.append(outlet)
        self._engines = []
        for engine in range(num_engines):
            inlet = self._context.socket(zmq.PUSH)
            inlet.set_hwm(_MAX_UNSENT)
            inlet.connect(wave_address(run_directory, engine))
            self._engines.append(inlet)
        self._waves = WaveCoordinator(num_engines, self._tell_engine, last_epoch=time.time_ns())
        self._stop_lock = threading.Lock()
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._inputs, zmq.POLLIN)
        self._poller.register(self._stop_event, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(CoordinatorInput | CoordinatorNotice)
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = False
        self._next_publication = 0.0

    def run(self) -> None:
        """Collect and publish until ``stop``."""
        while not self._stopping:
            wait = max(0.0, self._next_publication - time.monotonic()) if self._board.pending else None
            self._poller.poll(None if wait is None else int(1000 * wait) + 1)
            self._take_inputs()
            if self._board.pending and time.monotonic() >= self._next_publication:
                self._publish()

    def stop(self) -> None:
        """Let ``run`` return."""
        self._stopping = True
        with self._stop_lock:
            if self._stop_event >= 0:
                os.eventfd_write(self._stop_event, 1)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)
        with self._stop_lock:
            os.close(self._stop_event)
            self._stop_event = -1

    def _take_inputs(self) -> None:
        while True:
            try:
                frame = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
                if isinstance(message, EngineReport):
                    self._board.post(message)
                elif isinstance(message, JoinReports):
                    self._board.join(message.client)
                else:
                    self._waves.receive(message)
            except (msgspec.MsgspecError, IndexError) as error:
                logger.error("dropped a message that is none of this deployment's: %s", error)

    def _tell_engine(self, engine: int, message: RankInput) -> None:
        try:
            self._engines[engine].send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.error("engine %d takes nothing, not even when to step", engine)

    def _publish(self) -> None:
        self._next_publication = time.monotonic() + INTERVAL
        for client, outlet in enumerate(self._clients):
            reports = self._board.take(client)
            if not reports:
                continue
            try:
                outlet.send(self._encoder.encode(LoadReports(reports=reports)), zmq.NOBLOCK)
            except zmq.Again:
                self._board.join(client)
