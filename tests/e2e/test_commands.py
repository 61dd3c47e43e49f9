"""The commands that start a server or an engine of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ONE_THREAD, Start
from .running_server import START_TIMEOUT, Server, wait_until

TINY = ["--load-format", "dummy", "--dtype", "float32"]


def run(*arguments: str, said: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fourfold_server.cli", *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        env={**os.environ, **ONE_THREAD, **environment},
    )


def test_chat_talks_to_a_server(server: Server) -> None:
    result = run("chat", "--url", server.url, "--temperature", "0", said="What is the capital of France?\n/exit\n")
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout
    assert f"smollm2 at {server.url}" in result.stderr


def test_chat_starts_and_ends_a_server_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    result = run("chat", str(tiny_model), *TINY, "--max-tokens", "3", said="hello\n", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "http://127.0.0.1:" in result.stderr
    assert list((tmp_path / "fourfold").iterdir()) == []


def test_chat_with_a_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    result = run("chat", "no-such-model", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 2
    assert "no model called 'no-such-model'" in result.stderr
    assert "has no effect" not in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: the server exited with code 2"


def test_bench_serve_loads_a_server(start: Start) -> None:
    server = start()
    result = run("bench", "serve", "--url", server.url, "--num-prompts", "8", "--output-len", "6", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["completed"], report["output_tokens"], report["prompt_tokens"]) == (8, 48, 8 * 128)


@pytest.mark.parametrize(
    ("command", "key"), [("throughput", "output tokens per second"), ("latency", "time per output token, ms")]
)
def test_offline_benches_print_figures(tiny_model: Path, command: str, key: str) -> None:
    options = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--repeat", "2", "--json"]
    result = run("bench", command, str(tiny_model), *TINY, *options)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)[key]
    assert len(figures) == 2
    assert all(isinstance(figure, float) for figure in figures)


def test_ps_shows_a_running_deployment(start: Start) -> None:
    server = start()
    result = run("ps", "--json", XDG_RUNTIME_DIR=str(server.root.parent))
    (deployment,) = json.loads(result.stdout)
    shown = {(process["role"], process["state"], process["pid"]) for process in deployment["processes"]}
    assert shown == {
        ("api_server", "running", server.process.pid),
        ("engine_core", "running", server.engine_pid),
    }
    server.kill()
    wait_until(
        lambda: run("ps", XDG_RUNTIME_DIR=str(server.root.parent)).stdout == "no deployment is running\n", 10, "gone"
    )
