from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildSupervisor
from fourfold.supervision.stopped_processes import StoppedProcesses

from .test_child_process import DEADLINE, environment

ODD_NAME = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') T (x'); print('', flush=True); sys.stdin.read()"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Waits for the end of its input, under a name that looks like a state."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ODD_NAME], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def overdue_within(stopped: StoppedProcesses, pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if stopped.overdue([pid]) == [pid]:
            return True
        threading.Event().wait(0.02)
    return False


def test_only_what_is_stopped_for_long_is_overdue(process: subprocess.Popen[bytes]) -> None:
    stopped = StoppedProcesses(0.3)
    assert not overdue_within(stopped, process.pid, 0.5)
    process.send_signal(signal.SIGSTOP)
    assert not overdue_within(stopped, process.pid, 0.15)
    process.send_signal(signal.SIGCONT)
    assert not overdue_within(stopped, process.pid, 0.5)
    process.send_signal(signal.SIGSTOP)
    assert overdue_within(stopped, process.pid, DEADLINE)
    assert stopped.overdue([]) == []
    assert not overdue_within(stopped, 2**22 + 1, 0.1)  # above every pid


def test_a_child_that_is_stopped_for_long_is_killed_and_says_why() -> None:
    ends: list[ChildExit] = []
    with ChildSupervisor(stall_timeout=0.2) as supervisor:
        command = ChildCommand(module="fake_child", label="child", arguments=["deaf"], environment=environment())
        child = supervisor.start(command, on_exit=lambda _, how: ends.append(how))
        os.kill(child.pid, signal.SIGSTOP)
        assert child.wait(DEADLINE) == ChildExit(status=-signal.SIGKILL, reason="was stopped by a signal for 0.2 s")
        assert [str(how) for how in ends] == ["was stopped by a signal for 0.2 s"]
