"""Whether a process is gone, for tests that end processes."""

from __future__ import annotations

import psutil


def still_runs(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of a pid, still runs; a zombie does not. It may end while it is looked at."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
