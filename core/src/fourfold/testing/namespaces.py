"""Network namespaces that end with the process that made them, as does all that runs in them. Knows no cable.

``python -m fourfold.testing.namespaces NAME...`` removes those when its standard input ends, whatever has ended it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

END_SECONDS: Final = 10.0
"""For all that runs in a namespace to be gone once it was killed."""
_NAME: Final = re.compile(r"fourfold-(\d+)-[ab]")
"""With the process that made it: several may have namespaces at a time."""


def own_names() -> tuple[str, str]:
    """Of the two namespaces of this process."""
    return f"fourfold-{os.getpid()}-a", f"fourfold-{os.getpid()}-b"


def pids_in(name: str) -> list[int]:
    """What runs in a namespace; nothing in one that is not there."""
    found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def end_all(name: str) -> None:
    """Kill until nothing is left: a process may be starting another one. Raises TimeoutError for what does not end."""
    pause, deadline = threading.Event(), time.monotonic() + END_SECONDS
    while pids := pids_in(name):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} in {name} were killed and do not end within {END_SECONDS:g} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pause.wait(0.01)


def remove(names: Iterable[str]) -> None:
    """With all that runs in them; a name that is not there is passed over. Raises as ``end_all`` does."""
    for name in names:
        end_all(name)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def sweep() -> None:
    """Remove those of processes that have gone, and of this one. Raises OSError where there is no ``ip``."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    found = [match for match in map(_NAME.match, listed.splitlines()) if match is not None]
    remove([match[0] for match in found if not Path(f"/proc/{match[1]}").exists() or int(match[1]) == os.getpid()])


def start_keeper(names: Iterable[str]) -> subprocess.Popen[str]:
    """Removes ``names`` when this process has ended, however it did, or closes the keeper's standard input."""
    command = [sys.executable, "-P", "-m", "fourfold.testing.namespaces", *names]
    # In a session of its own: what ends this process may be meant for its whole group.
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def main() -> None:
    """Keep the namespaces of the command line."""
    sys.stdin.read()
    remove(sys.argv[1:])


if __name__ == "__main__":
    main()
