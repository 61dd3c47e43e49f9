from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.errors import EngineError
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor

HERE = Path(__file__).parent
DEADLINE = 20.0


class Listener:
    """Collects what the supervisor says."""

    def __init__(self) -> None:
        self.events: queue.Queue[bytes | ChildExit] = queue.Queue()

    def report(self, child: ChildProcess, message: bytes) -> None:
        self.events.put(message)

    def exit(self, child: ChildProcess, how: ChildExit) -> None:
        self.events.put(how)

    def next(self) -> bytes | ChildExit:
        return self.events.get(timeout=DEADLINE)

    def until_exit(self) -> list[bytes | ChildExit]:
        events = [self.next()]
        while not isinstance(events[-1], ChildExit):
            events.append(self.next())
        return events


@pytest.fixture
def supervisor() -> Iterator[ChildSupervisor]:
    with ChildSupervisor() as supervisor:
        yield supervisor


@pytest.fixture
def listener() -> Listener:
    return Listener()


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}


def start(supervisor: ChildSupervisor, listener: Listener, behaviour: str) -> ChildProcess:
    command = ChildCommand(
        module="fake_child", label=f"child {behaviour}", arguments=[behaviour], environment=environment()
    )
    child = supervisor.start(command, on_report=listener.report, on_exit=listener.exit)
    assert listener.next() == b"pid %d" % child.pid
    return child


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < deadline, f"process {pid} outlived its parent"
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [("exit-code", "exited with code 9"), ("segfault", "was killed by signal 11 (SIGSEGV)")],
)
def test_exit_is_noticed_and_described(
    supervisor: ChildSupervisor, listener: Listener, behaviour: str, text: str
) -> None:
    start(supervisor, listener, behaviour)
    assert str(listener.until_exit()[-1]) == text


def test_a_kill_from_outside_is_noticed_at_once(supervisor: ChildSupervisor, listener: Listener) -> None:
    child = start(supervisor, listener, "deaf")
    before = time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    assert listener.next() == ChildExit(status=-9)
    assert time.monotonic() - before < 2


def test_reports_before_an_exit_are_all_heard_in_order(supervisor: ChildSupervisor, listener: Listener) -> None:
    start(supervisor, listener, "last-words")
    assert listener.until_exit() == [*(b"word %d" % number for number in range(100)), ChildExit(status=3)]


def test_end_asks_first(supervisor: ChildSupervisor, listener: Listener) -> None:
    child = start(supervisor, listener, "polite")
    supervisor.end([child], grace=DEADLINE)
    assert listener.until_exit() == [b"stopping", ChildExit(status=0)]
    supervisor.end([child], grace=DEADLINE)  # harmless


def test_end_terminates_then_kills(supervisor: ChildSupervisor, listener: Listener) -> None:
    terminable, deaf = start(supervisor, listener, "terminable"), start(supervisor, listener, "deaf")
    supervisor.end([terminable, deaf], grace=0.05, terminate=0.5)
    assert (terminable.exit, deaf.exit) == (ChildExit(status=-signal.SIGTERM), ChildExit(status=-signal.SIGKILL))


def test_close_ends_all_and_refuses_new_children(listener: Listener) -> None:
    supervisor = ChildSupervisor()
    children = [start(supervisor, listener, "polite") for _ in range(2)]
    closers = [threading.Thread(target=supervisor.close, kwargs={"grace": DEADLINE}) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(DEADLINE)
    assert [child.exit for child in children] == [ChildExit(status=0)] * 2
    with pytest.raises(EngineError, match="cannot start child polite: its supervisor is closed"):
        start(supervisor, listener, "polite")


def test_ctrl_c_and_terminate_to_the_group_leave_children_alive(
    supervisor: ChildSupervisor, listener: Listener
) -> None:
    child = start(supervisor, listener, "polite")
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    supervisor.end([child], grace=DEADLINE)
    assert child.exit == ChildExit(status=0)


def test_a_failing_callback_does_not_stop_supervision(supervisor: ChildSupervisor, listener: Listener) -> None:
    def fail(child: ChildProcess, message: bytes) -> None:
        raise ValueError("from a callback")

    command = ChildCommand(module="fake_child", label="x", arguments=["exit-code"], environment=environment())
    supervisor.start(command, on_report=fail, on_exit=listener.exit)
    assert listener.next() == ChildExit(status=9)


def test_children_inherit_no_link_of_another_child(supervisor: ChildSupervisor, listener: Listener) -> None:
    start(supervisor, listener, "polite")
    start(supervisor, listener, "inherit")
    message = listener.next()
    # stdin, stdout, stderr, its own link, and the folder that it is listing
    assert isinstance(message, bytes)
    assert len(message.removeprefix(b"fds ").split(b",")) == 5


def test_a_command_that_cannot_start_is_an_error(supervisor: ChildSupervisor) -> None:
    with pytest.raises(EngineError, match="cannot start engine_core DP0: "):
        supervisor.start(ChildCommand(module="x", label="engine_core DP0", environment={"A\0B": ""}))


def test_a_child_refuses_to_run_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fake_child", "deaf"],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 1
    assert "started by fourfold itself, not by hand" in result.stderr


def test_no_child_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "fake_parent", "polite", "deaf", "busy"],
        env={**os.environ, **environment()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(parent.stdout.readline()) for _ in range(3)]
    parent.kill()
    parent.wait(DEADLINE)
    for pid in pids:
        wait_until_gone(pid)


def test_a_broken_link_alone_ends_a_busy_child(supervisor: ChildSupervisor, listener: Listener) -> None:
    child = start(supervisor, listener, "busy")
    child._link.shutdown(2)
    assert listener.next() == ChildExit(status=1)
