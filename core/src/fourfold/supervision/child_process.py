"""The parent's side of supervision: starts children, hears their reports, notices their exit, ends them.

Knows nothing of engines or ranks. One thread starts every child and lives as long as the process, because the kernel's
parent-death signal follows the thread. The child's side is in ``parent_watch``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from fourfold.errors import EngineError
from fourfold.supervision.parent_watch import HELD_SIGNALS, MAX_REPORT_BYTES, PARENT_VARIABLE, STOP
from fourfold.supervision.stopped_processes import StoppedProcesses

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_THREAD_TIMEOUT = 30.0
"""Seconds for the supervisor thread to answer; starting one process takes milliseconds."""
_KILL_TIMEOUT = 5.0
"""Seconds for the kernel to end a process after SIGKILL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildCommand:
    """A fresh interpreter that runs one module."""

    module: str
    label: str
    """How messages call it, such as ``engine_core DP0``."""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    """Variables on top of this process'."""
    pass_fds: Sequence[int] = ()
    """Descriptors that the child inherits under their numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildExit:
    """How a process ended."""

    status: int
    """Its exit code, or minus the number of the signal that killed it."""
    reason: str = ""
    """Why its supervisor killed it, if it did so by itself."""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.status >= 0:
            return f"exited with code {self.status}"
        return f"was killed by signal {-self.status} ({_signal_name(-self.status)})"


class ChildProcess:
    """One child; made by ``ChildSupervisor.start``."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, label: str) -> None:
        link.setblocking(False)
        self.label = label
        self.exit: ChildExit | None = None
        """How it ended; None while it runs."""
        self._reason = ""
        self._process = process
        self._link = link
        self._ended = threading.Event()

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """The process id; another process may have it once ``exit`` is set."""
        return self._process.pid

    def request_stop(self) -> None:
        """Ask it to end by itself; what that means is the child's business."""
        self.send(STOP)

    def send(self, message: bytes) -> bool:
        """Send one message to its ``ParentLink.on_message``; False if it has ended, or reads none."""
        try:
            self._link.send(message)
        except OSError:
            return False
        return True

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal unless it has ended."""
        self._process.send_signal(signum)

    def kill(self, reason: str) -> None:
        """End it at once; its exit then gives ``reason``."""
        self._reason = reason
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> ChildExit | None:
        """Wait until it has ended and its last report was heard; None when ``timeout`` seconds pass first."""
        self._ended.wait(timeout)
        return self.exit

    def receive(self) -> bytes | None:
        """The next report; empty once the child has closed the link, None when there is none now."""
        try:
            return self._link.recv(MAX_REPORT_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # it ended with a message of ours unread
            return b""

    def reap(self) -> ChildExit:
        """Take the exit status of a process that has ended, and wake those who wait."""
        self._link.close()
        self.exit = ChildExit(status=self._process.wait(_KILL_TIMEOUT), reason=self._reason)
        self._ended.set()
        return self.exit


OnReport = Callable[[ChildProcess, bytes], None]
OnExit = Callable[[ChildProcess, ChildExit], None]


class ChildSupervisor:
    """Owns the thread that starts children and listens to them. A ``with`` block ends them all.

    Callbacks run on that thread, for each child in the order report, report, exit, and must not wait for anything.
    """

    def __init__(self, *, stall_timeout: float | None = None) -> None:
        """``stall_timeout``: a child that a signal has stopped for so many seconds is killed; None: never."""
        self._stopped = None if stall_timeout is None else StoppedProcesses(stall_timeout)
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._children: dict[ChildProcess, int] = {}
        """Running children and their pidfd; used on the thread only."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="child-supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(
        self, command: ChildCommand, *, on_report: OnReport | None = None, on_exit: OnExit | None = None
    ) -> ChildProcess:
        """Start a child. Raises EngineError when it cannot be started or after ``close``."""
        with self._lock:
            if self._closing:
                raise EngineError(f"cannot start {command.label}: its supervisor is closed")
            future = self._submit(lambda: self._start(command, on_report or _ignore, on_exit or _ignore))
        try:
            return future.result(_THREAD_TIMEOUT)
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot start {command.label}: {error}") from error

    def end(self, children: Sequence[ChildProcess], *, grace: float, terminate: float = 1.0) -> None:
        """End ``children``: ask, wait ``grace`` seconds, SIGTERM, wait ``terminate`` seconds, SIGKILL.

        Each wait is for all of them together; a wait of 0 skips its step. Not from a callback.
        """
        remaining = list(children)
        if grace > 0:
            for child in remaining:
                child.request_stop()
            remaining = _wait_for(remaining, grace)
        for signum, timeout in ((signal.SIGTERM, terminate), (signal.SIGKILL, _KILL_TIMEOUT)):
            if timeout > 0:
                for child in remaining:
                    child.send_signal(signum)
                remaining = _wait_for(remaining, timeout)
        for child in remaining:
            logger.error("%s did not end within %g s of SIGKILL", child, _KILL_TIMEOUT)

    def close(self, *, grace: float = 1.0, terminate: float = 1.0) -> None:
        """End every child as ``end`` does, then the thread. Idempotent, and safe from several threads."""
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                running = self._submit(lambda: list(self._children))
        if first:
            self.end(running.result(_THREAD_TIMEOUT), grace=grace, terminate=terminate)
            self._submit(self._selector.close)
        self._thread.join(grace + terminate + _KILL_TIMEOUT)

    def _submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Run ``task`` on the thread."""
        future: Future[Result] = Future()
        self._tasks.append(partial(_fulfil, future, task))
        with contextlib.suppress(BlockingIOError):  # full of wake-ups: it is awake
            self._wake_sender.send(b"w")
        return future

    def _run(self) -> None:
        # The mask is inherited, so a child is deaf to these until it says what it does about them.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._run_tasks)
        next_look = 0.0
        while self._selector.get_map():  # None once closed
            wait = None
            if self._stopped is not None and self._children:
                wait = max(0.0, next_look - time.monotonic())
                if not wait:
                    self._kill_stopped(self._stopped)
                    next_look = time.monotonic() + self._stopped.look_every
                    continue
            for key, _ in self._selector.select(wait):
                try:
                    key.data()
                except Exception:
                    logger.exception("a supervision callback failed")
        self._wake_receiver.close()
        self._wake_sender.close()

    def _kill_stopped(self, stopped: StoppedProcesses) -> None:
        overdue = stopped.overdue([child.pid for child in self._children])
        for child in self._children:
            if child.pid in overdue:
                child.kill(str(stopped))

    def _run_tasks(self) -> None:
        self._wake_receiver.recv(4096)
        while self._tasks:
            self._tasks.popleft()()

    def _start(self, command: ChildCommand, on_report: OnReport, on_exit: OnExit) -> ChildProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            link_variable = {PARENT_VARIABLE: f"{os.getpid()}:{theirs.fileno()}"}
            try:
                # -P: a module in the working folder must not shadow an installed one.
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", command.module, *command.arguments],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(command.environment or {}), **link_variable},
                    pass_fds=(*command.pass_fds, theirs.fileno()),
                )
            except BaseException:
                ours.close()
                raise
        child = ChildProcess(process, ours, command.label)
        self._children[child] = pidfd = os.pidfd_open(process.pid)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, child, ours, on_report))
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._reap, child, ours, on_report, on_exit))
        return child

    def _hear(self, child: ChildProcess, link: socket.socket, on_report: OnReport) -> None:
        if child.exit is not None:  # reaped a moment ago, in the same round of events
            return
        message = child.receive()
        if message:
            on_report(child, message)
        elif message is not None:
            self._selector.unregister(link)

    def _reap(self, child: ChildProcess, link: socket.socket, on_report: OnReport, on_exit: OnExit) -> None:
        pidfd = self._children.pop(child)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if link in self._selector.get_map():
            self._selector.unregister(link)
        try:
            while message := child.receive():
                on_report(child, message)
        finally:
            on_exit(child, child.reap())


def _fulfil(future: Future[Result], task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)


def _ignore(child: ChildProcess, event: object) -> None:
    """Stand in for a callback that nobody gave."""


def _wait_for(children: Sequence[ChildProcess], timeout: float) -> list[ChildProcess]:
    """Those of ``children`` that are still running after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    return [child for child in children if child.wait(max(0.0, deadline - time.monotonic())) is None]


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "unknown"
