"""Kills processes that a signal has stopped for too long, for those who are not their parents. Knows no rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping

from fourfold.supervision.stopped_processes import StoppedProcesses

_JOIN_TIMEOUT = 5.0


class StoppedWatch:
    """One thread, which looks now and then."""

    def __init__(self, pids: Mapping[int, int], *, limit: float, on_killed: Callable[[int, str], None]) -> None:
        """``pids`` under numbers of the caller's. ``on_killed`` hears, on the thread, the number of one that was
        stopped for ``limit`` seconds and then killed, and what happened to it, as it follows its name.
        """
        self._pids = dict(pids)
        self._stopped = StoppedProcesses(limit)
        self._on_killed = on_killed
        self._descriptors: dict[int, int] = {}
        for number, pid in pids.items():
            with contextlib.suppress(OSError):  # it has ended
                # Whoever gets the same pid later is another process.
                self._descriptors[number] = os.pidfd_open(pid)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopped-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent; from any thread but its own it waits for the end."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        while self._descriptors and not self._closing.wait(self._stopped.look_every):
            overdue = self._stopped.overdue(self._pids[number] for number in self._descriptors)
            for number in [number for number in self._descriptors if self._pids[number] in overdue]:
                descriptor = self._descriptors.pop(number)
                try:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                except ProcessLookupError:  # another process has its pid
                    continue
                finally:
                    os.close(descriptor)
                self._on_killed(number, str(self._stopped))
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
