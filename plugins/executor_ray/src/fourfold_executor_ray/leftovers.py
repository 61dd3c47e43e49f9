"""Makes sure of the end of a process that is not a child of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

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
