"""Watches the processes of the other ranks on this host: one may end, or be stopped. Knows no call and no store."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from fourfold.supervision.stopped_processes import StoppedProcesses

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT: Final = 5.0
OnLost = Callable[[int, str], None]
"""(rank, what happened to it, to follow its name)."""


class PeerWatch:
    """One thread; it says once of a rank that it is lost."""

    def __init__(self, pids: Mapping[int, int], *, stall_timeout: float, on_lost: OnLost) -> None:
        """``pids`` by rank; processes that this one sees, and not itself."""
        self._pids = dict(pids)
        self._stopped = StoppedProcesses(stall_timeout)
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent; from any thread but its own."""
        if not self._closing.is_set():
            self._closing.set()
            os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
            opened.callback(os.close, self._wake)
            selector.register(self._wake, selectors.EVENT_READ)
            for rank, pid in list(self._pids.items()):
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._lose(rank, "has ended")
                except OSError as error:  # no more descriptors, or a sandbox: it is watched less closely
                    logger.warning("the end of rank %d (pid %d) will be noticed late: %s", rank, pid, error)
                else:
                    opened.callback(os.close, descriptor)
                    selector.register(descriptor, selectors.EVENT_READ, rank)
            next_look = 0.0
            while not self._closing.is_set():
                wait = max(0.0, next_look - time.monotonic())
                if not wait:
                    self._find_stopped()
                    next_look = time.monotonic() + self._stopped.look_every
                    continue
                for key, _ in selector.select(wait):
                    if key.fileobj != self._wake:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, "has ended")

    def _find_stopped(self) -> None:
        overdue = self._stopped.overdue(self._pids.values())
        for rank in [rank for rank, pid in self._pids.items() if pid in overdue]:
            self._lose(rank, str(self._stopped))

    def _lose(self, rank: int, how: str) -> None:
        if self._pids.pop(rank, None) is not None and not self._closing.is_set():
            self._on_lost(rank, how)
