from __future__ import annotations

import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fourfold.supervision.stopped_watch import StoppedWatch

from .test_child_process import DEADLINE

LIMIT = 0.3


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two that wait for the end of their input."""
    found = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.communicate(timeout=DEADLINE)


def test_what_is_stopped_for_too_long_is_killed_and_told_and_nothing_else(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    told: queue.Queue[tuple[int, str]] = queue.Queue()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE)
    pids = {7: processes[0].pid, 8: processes[1].pid, 9: gone.pid}
    watch = StoppedWatch(pids, limit=LIMIT, on_killed=lambda number, how: told.put((number, how)))
    processes[1].send_signal(signal.SIGSTOP)
    assert told.get(timeout=DEADLINE) == (8, "was stopped by a signal for 0.3 s")
    assert processes[1].wait(DEADLINE) == -signal.SIGKILL
    assert processes[0].poll() is None
    watch.close()
    processes[0].send_signal(signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        told.get(timeout=3 * LIMIT)
    assert processes[0].poll() is None


def test_whoever_hears_of_a_killed_one_may_close_the_watch(processes: list[subprocess.Popen[bytes]]) -> None:
    closed: queue.Queue[int] = queue.Queue()

    def close(number: int, how: str) -> None:
        watch.close()
        closed.put(number)

    watch = StoppedWatch({1: processes[0].pid}, limit=LIMIT, on_killed=close)
    processes[0].send_signal(signal.SIGSTOP)
    assert closed.get(timeout=DEADLINE) == 1
    watch.close()
