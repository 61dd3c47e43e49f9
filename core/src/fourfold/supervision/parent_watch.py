"""The child's side of supervision: dies with its parent, reports to it, hears its wish to stop. Imports nothing heavy.

Whoever starts a child is in ``child_process``. A child calls ``connect_to_parent`` before it imports anything heavy.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable

from fourfold.errors import EngineError

PARENT_VARIABLE = "_FOURFOLD_PARENT"  # not FOURFOLD_*: those are options
"""Environment of a child: ``<pid of the parent>:<descriptor of the link>``. Taken out when it is read."""

MAX_REPORT_BYTES = 64 * 1024
"""A report is one datagram; this is well below the smallest default send buffer of a Unix socket (208 KiB)."""

STOP = b"stop"

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a service manager sends to a whole group: the parent answers them for its children."""

_PR_SET_PDEATHSIG = 1


def started_by_parent() -> bool:
    """Whether this process was started by ``child_process`` and has not connected yet."""
    return PARENT_VARIABLE in os.environ


def connect_to_parent(*, ignored_signals: Iterable[signal.Signals] = HELD_SIGNALS) -> ParentLink:
    """Tie this process' life to its parent's. Call first, and on the main thread.

    The kernel kills this process when the thread that started it ends, and a thread here ends it when the link breaks.
    ``ignored_signals`` leave this process alive, so that Ctrl-C or a signal to the whole group lets the parent drain.
    Raises EngineError in a process that ``child_process`` did not start.
    """
    value = os.environ.pop(PARENT_VARIABLE, "")
    parent, _, descriptor = value.partition(":")
    if not (parent.isdigit() and descriptor.isdigit()):
        raise EngineError("this module is started by fourfold itself, not by hand; run `fourfold serve`")
    _set_parent_death_signal()
    if os.getppid() != int(parent):  # it died between starting us and the line above
        os._exit(1)
    for signum in ignored_signals:
        signal.signal(signum, signal.SIG_IGN)
    # The parent blocked these so that none arrived before the handlers stood.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    return ParentLink(socket.socket(fileno=int(descriptor)))


class ParentLink:
    """The child's end of the link."""

    def __init__(self, link: socket.socket) -> None:
        link.set_inheritable(False)
        self._link = link
        self._lock = threading.Lock()
        self._stop_requested = False
        self._stop_callbacks: list[Callable[[], None]] = []
        self._message_callback: Callable[[bytes], None] | None = None
        self._unheard: list[bytes] = []
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def report(self, message: bytes) -> None:
        """Send one message of 1 to MAX_REPORT_BYTES bytes to the parent. Raises EngineError for another size."""
        if not 0 < len(message) <= MAX_REPORT_BYTES:
            raise EngineError(f"a report of {len(message)} bytes; from 1 to {MAX_REPORT_BYTES}")
        self._link.send(message)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call back when the parent wishes this process to end; at once if it already does.

        The callback runs on the link's thread and must return at once.
        """
        with self._lock:
            self._stop_callbacks.append(callback)
            requested = self._stop_requested
        if requested:
            callback()

    def on_message(self, callback: Callable[[bytes], None]) -> None:
        """Call back with every other message of the parent, in order, earlier ones included. Call once.

        The callback runs on the link's thread, or on this one, and must return at once.
        """
        with self._lock:
            self._message_callback = callback
            for message in self._unheard:
                callback(message)
            self._unheard.clear()

    def _watch(self) -> None:
        while message := self._receive():
            if message == STOP:
                self._request_stop()
            else:
                self._hand_on(message)
        # The parent is gone or wants us gone: nothing may be waited for.
        os._exit(1)

    def _hand_on(self, message: bytes) -> None:
        with self._lock:
            if self._message_callback is None:
                self._unheard.append(message)
            else:
                self._message_callback(message)

    def _request_stop(self) -> None:
        with self._lock:
            self._stop_requested = True
            callbacks = list(self._stop_callbacks)
        for callback in callbacks:
            callback()

    def _receive(self) -> bytes:
        try:
            return self._link.recv(MAX_REPORT_BYTES)
        except OSError:
            return b""


def _set_parent_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
