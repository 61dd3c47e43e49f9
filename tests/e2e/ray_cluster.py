"""A Ray cluster on this host, in a session of its own, that users of it are given."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold_executor_ray.session import kill_session

PROGRAM = Path(__file__).parents[2] / "plugins" / "executor_ray" / "tests" / "cluster_program.py"


class RayCluster:
    """Its first node runs what is started here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line()

    @property
    def session(self) -> int:
        """Of all its processes."""
        return self._process.pid

    def order(self, text: str) -> None:
        """``kill N`` ends a node, ``add CPUS`` brings another one."""
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)
        assert self._line() == "done"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def started_cluster(*cpus: int) -> Iterator[RayCluster]:
    """Nodes of so many CPUs."""
    # With a short path, as sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, folder, *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield RayCluster(process)
        finally:
            kill_session(process.pid)
            process.communicate(timeout=60)
