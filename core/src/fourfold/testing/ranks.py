"""Runs a function on N ranks, for real, and never hangs the test session. Ranks are reused while they answer."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from fourfold.testing.rank_process import receive_frame, send_frame

START_SECONDS = 90.0
"""For the first answer of new ranks: several processes import torch on few cores."""
AFTER_FAILURE = 5.0
"""Seconds that the others get once one rank has failed: peers of a dead rank may never return."""


class RankError(AssertionError):
    """Ranks failed; the message holds each one's traceback."""


class RankPool:
    """N processes that run the same function at the same time."""

    def __init__(self, world_size: int, environment: Callable[[int], Mapping[str, str]] = lambda rank: {}) -> None:
        """``environment`` gives the variables that a rank has besides this process' own."""
        self.world_size = world_size
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[socket.socket] = []
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Any]:
        """Call ``function(Rank, *args)`` on every rank; the results, in rank order, all of them plain values.

        Raises RankError, naming the ranks that failed and those still running after ``deadline`` seconds; the ranks are
        then started anew by the next call.
        """
        if not self._processes:
            self._start()
            deadline = max(deadline, START_SECONDS)
        self._calls += 1
        file = function.__code__.co_filename
        for line in self._lines:
            send_frame(line, (self._calls, file, function.__qualname__, list(args)))
        try:
            return self._collect(time.monotonic() + deadline)
        except RankError:
            self.close()
            raise

    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the ranks; idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(10)
        for line in self._lines:
            line.close()
        self._processes.clear()
        self._lines.clear()

    def _start(self) -> None:
        store = os.memfd_create("ranks")
        try:
            for rank in range(self.world_size):
                ours, theirs = socket.socketpair()
                command = [sys.executable, "-m", "fourfold.testing.rank_process", "--rank", str(rank)]
                command += ["--world-size", str(self.world_size), "--line", str(theirs.fileno()), "--store", str(store)]
                variables = {**os.environ, **self._environment(rank)}
                self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(), store), env=variables))
                theirs.close()
                self._lines.append(ours)
        finally:
            os.close(store)

    def _collect(self, deadline: float) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        problems: dict[int, str] = {}
        pending = dict(enumerate(self._lines))
        while pending:
            ready, _, _ = select.select(list(pending.values()), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                problems |= dict.fromkeys(pending, "still running at the deadline")
                break
            for rank in [rank for rank, line in pending.items() if line in ready]:
                try:
                    fine, value = receive_frame(pending.pop(rank))
                except (EOFError, ConnectionError):
                    fine, value = False, "the process died without a word"
                if fine:
                    results[rank] = value
                else:
                    problems[rank] = value
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        if problems:
            raise RankError("\n".join(f"[rank {rank}] {problem}" for rank, problem in sorted(problems.items())))
        return results
