"""Where ranks of the executor's own host come in: a Unix socket in a private folder. Knows no call."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fourfold.rpc.frames import FrameReader
from fourfold_executor_ray.messages import Arrival

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT: Final = 10.0
_JOIN_TIMEOUT: Final = 5.0


class Door:
    """Takes connections on a thread of its own until it is closed."""

    def __init__(self, path: Path, on_arrival: Callable[[Arrival, socket.socket], None]) -> None:
        """``on_arrival`` owns the stream that it is given."""
        self.path = path
        self._on_arrival = on_arrival
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._run, name="ray-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_TIMEOUT)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            stream.settimeout(_HELLO_TIMEOUT)
            try:
                arrival = _read_arrival(stream)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                logger.warning("somebody at %s was no rank: %s", self.path, error)
                stream.close()
                continue
            stream.settimeout(None)
            self._on_arrival(arrival, stream)


def _read_arrival(stream: socket.socket) -> Arrival:
    reader = FrameReader(stream)
    while not (frames := reader.read()):
        pass
    # A rank says nothing more before it is asked, so the first frame is all that was read.
    return msgspec.msgpack.decode(frames[0].payload, type=Arrival)
