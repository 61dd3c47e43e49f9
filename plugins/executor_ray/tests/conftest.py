from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.entries import ExecutorContext
from fourfold.testing.processes import still_runs
from fourfold_executor_ray.executor import RayExecutor
from fourfold_executor_ray.session import kill_session, members
from fourfold_executor_ray.settings import RaySettings

HERE = Path(__file__).parent
DEADLINE = 60.0


class RayCluster:
    """One that runs in a session of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line()

    def kill(self, node: int) -> None:
        """A node dies, with all its processes."""
        self._ask(f"kill {node}")

    def add(self, cpus: int, path: str = "") -> None:
        """Another node joins, which finds more modules in ``path``."""
        self._ask(f"add {cpus} {path}")

    def _ask(self, order: str) -> None:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        assert self._line() == "done"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def started_cluster(*cpus: int) -> Iterator[RayCluster]:
    # With a short path, as sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", HERE / "cluster_program.py", folder, *map(str, cpus)],
            env=with_tests_on_path(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield RayCluster(process)
        finally:
            kill_session(process.pid)
            process.communicate(timeout=DEADLINE)
            wait_until(lambda: not any(map(still_runs, members(process.pid))), "the end of the cluster")


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RayCluster]:
    """Two nodes of 2 CPUs, for all tests."""
    with started_cluster(2, 2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The same, given by the environment."""
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster.address)
    return shared_cluster


def make_context(
    tp: int = 2,
    pp: int = 1,
    *,
    worker: str = "fourfold.testing.workers:EchoWorker",
    settings: RaySettings | None = None,
    **timeouts: float,
) -> ExecutorContext:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        timeouts=TimeoutConfig(**{"rpc_timeout": DEADLINE, "startup_timeout": DEADLINE, **timeouts}),
        plugins={"ray": settings or RaySettings()},
    )
    return ExecutorContext(config=config, layout=config.parallel.layout, worker=worker)


def wait_until(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        threading.Event().wait(0.01)
    return value


def with_tests_on_path() -> dict[str, str]:
    """An environment in which ranks find what lies beside the tests."""
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def start() -> Iterator[Callable[..., RayExecutor]]:
    """Starts executors, and ends them."""
    executors: list[RayExecutor] = []

    def start(*args: Any, **kwargs: Any) -> RayExecutor:
        executors.append(RayExecutor(make_context(*args, **kwargs)))
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()
