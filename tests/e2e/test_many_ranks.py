"""A deployment whose engine has several ranks, each a process: what it shows, and how it ends when one is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from fourfold.testing.processes import still_runs

from .conftest import Start
from .running_server import Server, Stream, wait_until

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def four_heads(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with heads for four ranks."""
    folder = tmp_path / "four-heads"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 2}))
    return folder


def worker_pid(server: Server, label: str) -> int:
    with server.client() as client:
        processes = client.get("/topology").json()["processes"]
    (pid,) = [row["pid"] for row in processes if (row["role"], row["label"]) == ("worker", label)]
    assert isinstance(pid, int)
    return pid


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [process for process in alive if still_runs(process)]


def test_four_ranks_are_six_processes_and_none_outlives_the_first(start: Start, four_heads: Path) -> None:
    server = start("--executor", "mp", "--tensor-parallel-size", "4", model=four_heads)
    children = server.descendants()
    expected = {"fourfold engine_core DP0", *(f"fourfold worker DP0.PP0.TP{rank}" for rank in range(4))}
    assert {" ".join(child.cmdline()).strip() for child in children} == expected
    shown = subprocess.run(
        [sys.executable, "-m", "fourfold_server.cli", "ps", "--json"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(server.root.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    (deployment,) = json.loads(shown.stdout)
    pids = [process["pid"] for process in deployment["processes"]]
    assert sorted(pids) == sorted([server.process.pid, *(child.pid for child in children)])
    stream = Stream(server, "/v1/completions", LONG)
    stream.wait_for_events(2)
    server.signal(signal.SIGKILL)
    wait_until_gone(children)
    stream.join()


def test_a_rank_that_is_killed_while_idle_is_named(start: Start) -> None:
    server = start("--executor", "mp", "--tensor-parallel-size", "2", "--on-failure", "exit")
    children = server.descendants()
    os.kill(worker_pid(server, "DP0.PP0.TP1"), signal.SIGKILL)
    assert server.wait(5) == 1
    assert "rank 1 was killed by signal 9 (SIGKILL) while idle" in server.lines[-1]
    wait_until_gone(children)


STALL = 2.0
LOST = {
    signal.SIGKILL: (r"rank 1 was killed by signal 9 \(SIGKILL\) during execute_model", 0.0),
    # Whoever waits for the rank may be first to say so.
    signal.SIGSTOP: (r"rank 1 was stopped by a signal for 2 s during execute_model|from rank\(s\) 1$", 1.5 * STALL),
}


@pytest.mark.parametrize("signum", LOST)
def test_a_lost_rank_is_named_to_everyone_and_the_engine_comes_back(
    start: Start, four_heads: Path, signum: signal.Signals
) -> None:
    options = ("--executor", "mp", "--tensor-parallel-size", "3", "--stall-timeout", f"{STALL:g}")
    server = start(*options, model=four_heads)
    children = server.descendants()
    text, seconds = LOST[signum]

    def ask() -> httpx.Response:
        with server.client() as client:
            return client.post("/v1/completions", json=LONG)

    with ThreadPoolExecutor(2) as pool:
        whole = [pool.submit(ask) for _ in range(2)]
        streams = [Stream(server, "/v1/completions", LONG) for _ in range(4)]
        for stream in streams:
            stream.wait_for_events(2)
        os.kill(worker_pid(server, "DP0.PP0.TP1"), signum)
        for stream in streams:
            stream.join(seconds + 3)
        answers = [future.result(3) for future in whole]
    errors = [stream.error for stream in streams]
    for answer in answers:
        assert answer.status_code in (500, 503)
        errors.append(answer.json()["error"])
    for error in errors:
        assert error is not None
        assert error["type"] == "server_error"
        assert re.search(text, error["message"]), error
    wait_until_gone(children)
    wait_until(lambda: server.status("/readyz") == 503, 3, "/readyz is 503")
    wait_until(lambda: server.status("/readyz") == 200, 60, "ready again")
    assert len(server.descendants()) == len(children)


def test_a_rank_that_is_killed_while_loading_ends_the_start(start: Start) -> None:
    server = start("--executor", "mp", "--tensor-parallel-size", "2", ready=False)

    def rank() -> psutil.Process | None:
        titles = {child: " ".join(child.cmdline()).strip() for child in server.descendants()}
        return next((child for child, title in titles.items() if title.endswith("TP1")), None)

    victim = wait_until(rank, 60, "a rank")
    children = server.descendants()
    victim.kill()
    assert server.wait(5) == 1
    assert "rank 1 was killed by signal 9 (SIGKILL) during" in server.lines[-1]
    wait_until_gone(children)
