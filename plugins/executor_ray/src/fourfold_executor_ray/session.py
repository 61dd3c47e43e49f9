"""Ends a cluster that belongs to one executor, however its driver ends: everything in the session that it leads.

``python -m fourfold_executor_ray.session FOLDER`` is the watchman whom the driver starts, and who lives until it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def members(session: int) -> Iterator[int]:
    """The processes of a session, whatever their process groups are."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == session:
                    yield int(path.name)


def kill_session(session: int) -> None:
    """Kill all but the caller. The number of a session is free for others only when its last process has gone."""
    for pid in members(session):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_watchman(folder: str) -> subprocess.Popen[bytes]:
    """When this process ends, kill what is left of its session, and remove ``folder``.

    Ray's own processes end with their parent or look for it now and then, which takes some of them half a minute.
    """
    return subprocess.Popen([sys.executable, "-P", "-m", __spec__.name, folder], stdin=subprocess.PIPE)


def _watch(folder: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.read()
    kill_session(os.getsid(0))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1])
