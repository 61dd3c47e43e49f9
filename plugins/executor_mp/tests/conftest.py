from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.entries import ExecutorContext
from fourfold.testing.processes import still_runs
from fourfold_executor_mp.executor import MpExecutor

HERE = Path(__file__).parent
DEADLINE = 20.0

Start = Callable[..., MpExecutor]


def make_context(
    ranks: int = 2, *, dp: int = 1, dp_rank: int = 0, worker: str = "faulty_worker:FaultyWorker", **timeouts: float
) -> ExecutorContext:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=ranks, data_parallel_size=dp),
        timeouts=TimeoutConfig(**{"rpc_timeout": DEADLINE, "startup_timeout": DEADLINE, **timeouts}),
    )
    return ExecutorContext(config=config, layout=config.parallel.layout, worker=worker, dp_rank=dp_rank)


def wait_until(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        threading.Event().wait(0.01)
    return value


def children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if still_runs(child)}


@pytest.fixture(autouse=True)
def _faulty_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find ``faulty_worker``."""
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors, and checks in the end that none has left a process."""
    before = children()
    executors: list[MpExecutor] = []

    def start(*args: Any, **kwargs: Any) -> MpExecutor:
        executors.append(MpExecutor(make_context(*args, **kwargs)))
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()
    assert children() - before == set()
