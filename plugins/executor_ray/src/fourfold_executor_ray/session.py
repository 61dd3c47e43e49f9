"""Ends what is left of a cluster that belongs to one executor: everything in the session that its driver leads."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from fourfold.supervision.run_directory import ProcessState, is_running


def end_process(state: ProcessState, grace: float) -> None:
    """Wait ``grace`` seconds for the end of a process of this host, then kill it; those of others are left alone."""
    if state.host != socket.gethostname() or not is_running(state):
        return
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(state.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(1000 * grace) and is_running(state):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def members(session: int) -> Iterator[int]:
    """The processes of a session, whatever their process groups are."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == session:
                    yield int(path.name)


def kill_session(session: int) -> None:
    """Kill them all. The number of a session is free for others only when its last process has gone."""
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
