"""Programs that run in a Ray cluster, and are not started by ours: a submitted job, and what a notebook does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fourfold_executor_ray.session import kill_session

from .conftest import ONE_THREAD
from .running_server import wait_until

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parent / "ray_program.py"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **ONE_THREAD}


def clean(environment: dict[str, str]) -> dict[str, str]:
    """This process' environment without a cluster of its own, and without proxies, which reach nothing here."""
    given = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    given.pop("RAY_ADDRESS", None)
    return given | ENVIRONMENT | environment


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """A cluster that takes jobs at this URL."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, jobs = one.getsockname()[1], other.getsockname()[1]
    start = [*RAY, "start", "--block", "--head", f"--port={port}", "--num-cpus=3", "--object-store-memory=100000000"]
    start += [f"--dashboard-port={jobs}", f"--temp-dir={folder}", "--node-ip-address=127.0.0.1"]
    process = subprocess.Popen(start, env=clean({}), stdout=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{jobs}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/api/version", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, 120, f"the dashboard at {url}")
        yield url
    finally:
        kill_session(process.pid)
        process.wait(10)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ff-ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_a_submitted_job_runs_its_ranks_in_the_cluster(folder: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="jobs need ray[default], which is not installed")
    with dashboard(folder) as url:
        submit = [*RAY, "job", "submit", "--address", url, "--", sys.executable, str(PROGRAM)]
        result = subprocess.run(submit, env=clean({}), capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[lines.index("ray") + 1] == "Paris."


def test_a_program_that_has_called_ray_init_brings_its_cluster_and_keeps_it(folder: Path) -> None:
    command = [sys.executable, str(PROGRAM), "2"]
    environment = clean({"RAY_TMPDIR": str(folder)})
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["ray", "Paris.", "still connected"]
