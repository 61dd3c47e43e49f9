from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fourfold import hookimpl
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.transport import encode_config
from fourfold.entries import LoadBalancerEntry
from fourfold.errors import CheckpointError, EngineError, PluginError
from fourfold.plugins import load_plugins
from fourfold.supervision.run_directory import CONFIG_FILE, RunDirectory, process_state
from fourfold_server import cli

DEADLINE = 60.0


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fourfold_server.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, click\nfrom fourfold_server.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('loaded', *sorted({'torch', 'fastapi', 'uvicorn', 'zmq', 'httpx', 'rich', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    for command in ("serve", "chat", "bench", "plugins", "ps"):
        assert f"  {command} " in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded"


def test_help_is_quick() -> None:
    seconds = []
    for _ in range(5):
        before = time.perf_counter()
        run("--help")
        seconds.append(time.perf_counter() - before)
    assert min(seconds) < 0.3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serv"], "no command 'serv'; did you mean 'serve'?"),
        (["xyzzy"], "no command 'xyzzy'; commands are serve, chat, bench, simulate, plugins, ps"),
        (["ps", "--jsn"], "--json"),
        (["serve", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serve", "--port", "70000"], "--port is 70000"),
        (["serve", "--on-failure", "ignore"], "one of restart, exit"),
        (["serve", "--api-key", " "], "--api-key is empty"),
        (["serve", "--ssl-certfile", "/none"], "HTTPS needs both"),
        (["serve", "--executor", "uniprocc"], "did you mean 'uniproc'?"),
        (["serve", "--api-server-count", "0"], "--api-server-count is 0; 1 or more"),
        (["serve", "--host", "256.256.256.256"], "--host is '256.256.256.256'"),
        (["chat", "--url", "ftp://x", "smollm2"], "not both"),
        (["chat", "--dtype", "float32"], "come after MODEL"),
        (["bench", "serve", "--url", "127.0.0.1:8000"], "write http://127.0.0.1:8000"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    message = result.stderr.rpartition("Error: ")[2]
    assert text in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_an_unknown_model_is_told_where_models_come_from() -> None:
    result = run("serve", "no-such-model")
    assert result.returncode == 2
    lines = result.stderr.rpartition("Error: ")[2].splitlines()
    assert lines[:2] == ["no model called 'no-such-model'", "models come from"]
    assert all(line.startswith("  ") for line in lines[2:])


def test_a_key_is_in_no_message() -> None:
    result = run("serve", "no-such-model", FOURFOLD_API_KEY="very-secret")
    assert result.returncode == 2
    assert "very-secret" not in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("error", "status"),
    [(CheckpointError("truncated"), 2), (PluginError("broken"), 2), (EngineError("died"), 1)],
)
def test_errors_raised_on_purpose_have_their_status(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("fourfold_server.ps.deployments", fail)
    result = CliRunner().invoke(cli.main, ["ps"])
    assert (result.exit_code, result.stderr) == (status, f"Error: {error}\n")


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("fourfold, version ")


def test_ps_shows_processes(tmp_path: Path) -> None:
    assert run("ps", XDG_RUNTIME_DIR=str(tmp_path)).stdout == "no deployment is running\n"
    with RunDirectory.create(tmp_path / "fourfold") as directory:
        config = EngineConfig(model=ModelConfig(model="/models/a", served_model_name=("tiny", "b")))
        directory.write_file(CONFIG_FILE, encode_config(config))
        directory.write_state(process_state("api_server", "", "running", detail="http://127.0.0.1:8000"))
        directory.write_state(process_state("engine_core", "DP0", "starting"))
        table = run("ps", XDG_RUNTIME_DIR=str(tmp_path)).stdout.splitlines()
        assert table[0].split() == ["DEPLOYMENT", "MODEL", "ROLE", "LABEL", "PID", "AGE", "STATE", "DETAIL"]
        name = directory.path.name
        rows = [line.split() for line in table[1:]]
        ages = [row.pop(-3 if row[2] == "api_server" else -2) for row in rows]
        assert rows == [
            [name, "tiny", "api_server", str(os.getpid()), "running", "http://127.0.0.1:8000"],
            [name, "tiny", "engine_core", "DP0", str(os.getpid()), "starting"],
        ]
        assert all(re.fullmatch(r"\d+[smhd]", age) for age in ages)
        (deployment,) = json.loads(run("ps", "--json", XDG_RUNTIME_DIR=str(tmp_path)).stdout)
        assert [process["role"] for process in deployment["processes"]] == ["api_server", "engine_core"]


def test_plugins_shows_a_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @hookimpl
        def fourfold_load_balancers(self) -> list[LoadBalancerEntry]:
            return [LoadBalancerEntry(name="x", build=lambda context: None)]

    registry = load_plugins(entry_points=False, extra={"one": Plugin(), "two": Plugin()})
    monkeypatch.setattr("fourfold_server.plugins_command.load_plugins", lambda: registry)
    clash = "two plugins offer load balancer 'x': plugin 'one' (given in code) and plugin 'two' (given in code)"
    assert f"clash: {clash}" in CliRunner().invoke(cli.main, ["plugins"]).stdout
    shown = json.loads(CliRunner().invoke(cli.main, ["plugins", "--json"]).stdout)
    assert shown["clashes"] == [f"{clash}; uninstall one of them"]


def test_plugins_shows_what_is_installed_and_what_would_be_chosen() -> None:
    shown = json.loads(run("plugins", "--json").stdout)
    core = next(plugin for plugin in shown["plugins"] if plugin["plugin"] == "core")
    torch = next(offer for offer in core["offers"] if offer["kind"] == "attention backend")
    assert (torch["name"], torch["can_run"]) == ("torch", True)
    explained = json.loads(run("plugins", "--explain", "--json", "--tensor-parallel-size", "1").stdout)
    executor = next(one for one in explained if one["kind"] == "executor")
    assert executor["chosen"] == "uniproc"
    text = run("plugins").stdout
    assert "uniproc" in text
    assert "executor 'uniproc' (auto)" in run("plugins", "--explain").stdout
