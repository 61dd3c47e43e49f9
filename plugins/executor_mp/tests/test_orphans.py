"""Whatever kills the parent, and whenever: no rank outlives it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from fourfold.testing.processes import still_runs

from .conftest import HERE, wait_until
from .faulty_worker import FAULT


@pytest.mark.parametrize("moment", ["loading", "idle", "working"])
def test_no_rank_outlives_a_parent_that_is_killed(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if moment == "loading":
        monkeypatch.setenv(FAULT, "1:hang")
    with subprocess.Popen(
        [sys.executable, HERE / "orphan_parent.py", moment], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        parent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert [rank for rank in alive if still_runs(rank)] == []


def test_no_rank_outlives_a_parent_that_just_ends() -> None:
    code = (
        "import faulty_worker, psutil\n"
        "from fourfold.config.engine_config import EngineConfig\n"
        "from fourfold.entries import ExecutorContext\n"
        "from fourfold_executor_mp.executor import MpExecutor\n"
        "config = EngineConfig()\n"
        "made = MpExecutor(ExecutorContext(config=config, layout=config.parallel.layout,\n"
        "                                  worker='faulty_worker:FaultyWorker'))\n"
        "print(psutil.Process().children()[0].pid)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    wait_until(lambda: not psutil.pid_exists(int(result.stdout)), "the end of the rank", 5)
