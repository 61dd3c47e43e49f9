"""An outsider's executor: written by the scaffold, built as a wheel, installed elsewhere, found, selected and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fourfold.errors import ConfigError
from fourfold.scaffold import kinds, main, write_plugin

RUN_IT = """
from fourfold.config.options import build_engine_config
from fourfold.config.resolution import resolve
from fourfold.entries import ExecutorContext
from fourfold.layout import ParallelLayout
from fourfold.plugins import load_plugins
from fourfold.selection import select

registry = load_plugins()
config = resolve(build_engine_config(executor="fresh"), registry).config
selection = select("executor", registry.executors(), config.backends.executor, config)
worker = "fourfold.testing.workers:EchoWorker"
executor = selection.entry.build(ExecutorContext(config=config, layout=ParallelLayout(dp=1, pp=1, tp=3), worker=worker))
several = build_engine_config(tensor_parallel_size=2)
print(selection.entry.suits(several).score)
print([row.package for row in registry.manifest if row.plugin == "executor-fresh"])
print(executor.collective_rpc("who"))
executor.shutdown()
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plugin("executor", "fresh", tmp_path_factory.mktemp("outsider"))


@pytest.fixture(scope="module")
def environment(plugin: Path) -> dict[str, str]:
    """This environment with the plugin's wheel installed beside it."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wheels = plugin.parent / "wheels"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, plugin]
    subprocess.run([*pip, *build], check=True)
    site = plugin.parent / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *wheels.glob("*.whl")], check=True)
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_it_is_found_selected_and_run(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", RUN_IT]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0", "['fourfold-executor-fresh 0.1.0']", "[(0, 3), (1, 3), (2, 3)]"]


def test_the_command_shows_it(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fourfold_server.cli", "plugins"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "fourfold-executor-fresh" in result.stdout
    assert "fresh" in result.stdout


def test_it_passes_the_conformance_tests_as_written(plugin: Path, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(plugin / "tests")]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " failed" not in result.stdout
    assert "1 xfailed" in result.stdout
    assert int(result.stdout.split(" passed")[0].split()[-1]) >= 30


def test_it_is_clean(plugin: Path) -> None:
    root = Path(__file__).parent.parent
    config = ["--config", str(root / "pyproject.toml")]
    for command in (["ruff", "check", *config], ["ruff", "format", "--check", *config], ["mypy", "--strict"]):
        arguments = [str(plugin / "src")]
        result = subprocess.run(
            [sys.executable, "-m", *command, *arguments], cwd=plugin, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_scaffold_refuses(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'Fresh' must be lowercase letters, digits and underscores, such as 'slurm'"
    ):
        write_plugin("executor", "Fresh", tmp_path)
    with pytest.raises(ConfigError, match="no template called 'cook'; there are executor"):
        write_plugin("cook", "fresh", tmp_path)
    with pytest.raises(ConfigError, match="is already there"):
        write_plugin("executor", "fresh", plugin.parent)


def test_the_scaffold_is_a_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["executor", "other", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "fourfold-executor-other" / "pyproject.toml").is_file()
    refused = CliRunner().invoke(main, ["executor", "other", str(tmp_path)])
    assert refused.exit_code == 2
    assert "is already there" in refused.output
    assert kinds() == ["executor"]
    shown = CliRunner().invoke(main, ["-h"]).output
    assert "Kinds: executor." in shown


def test_names_may_have_underscores(tmp_path: Path) -> None:
    project = write_plugin("executor", "two_words", tmp_path)
    assert project.name == "fourfold-executor-two-words"
    text = (project / "pyproject.toml").read_text()
    assert 'executor-two-words = "fourfold_executor_two_words.plugin"' in text
    assert 'dependencies = ["fourfold-core>=0.1.0,<0.2"]' in text
    assert "class TwoWordsExecutor" in (project / "src/fourfold_executor_two_words/executor.py").read_text()
