"""Every distribution as a wheel, installed alone, as a user would get it: no sources, no torch."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .distributions import PROJECTS, metadata

LIGHT = ("pluggy", "packaging", "msgspec", "click", "pyyaml")
"""What discovery and options need beside our wheels."""


@pytest.fixture(scope="session")
def python(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has our wheels and ``LIGHT``, and nothing else: no torch, no sources."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    command = [sys.executable, "-m", "pip", "--quiet", "--python", venv, "install", "--no-deps"]
    subprocess.run([*command, *LIGHT, *wheels], check=True)
    return venv / "bin" / "python"


def run(python: Path, code: str) -> str:
    command = [python, "-I", "-W", "error", "-c", code]
    result = subprocess.run(command, check=False, cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_one_wheel_a_project(wheels: list[Path]) -> None:
    assert len(wheels) == len(PROJECTS)


def test_versions_agree() -> None:
    assert len({metadata(project)["version"] for project in PROJECTS}) == 1


def test_siblings_are_pinned_to_the_shared_version() -> None:
    names = {metadata(project)["name"] for project in PROJECTS}
    for project in PROJECTS:
        table = metadata(project)
        for requirement in table["dependencies"]:
            if re.match(r"[\w.-]+", requirement)[0] in names:
                assert requirement.endswith(f"=={table['version']}"), (project.name, requirement)


def test_every_plugin_requires_core() -> None:
    for project in PROJECTS:
        if project.name != "core":
            assert any(one.startswith("fourfold-core==") for one in metadata(project)["dependencies"]), project.name


def test_each_wheel_holds_one_package_and_no_tests(wheels: list[Path]) -> None:
    owners: dict[str, Path] = {}
    for wheel in wheels:
        files = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
        packages = {name.split("/")[0] for name in files}
        assert len(packages) == 1, (wheel.name, packages)
        assert packages.isdisjoint(owners), f"{wheel.name} and {owners[packages.pop()].name} ship the same package"
        assert not [name for name in files if name.startswith("tests/") or name.endswith((".so", ".o", ".pyc"))]
        owners.update(dict.fromkeys(packages, wheel))


def test_templates_and_types_are_in_the_core_wheel(wheels: list[Path]) -> None:
    [core] = [wheel for wheel in wheels if wheel.name.startswith("fourfold_core-")]
    files = zipfile.ZipFile(core).namelist()
    assert "fourfold/py.typed" in files
    assert "fourfold/templates/executor/pyproject.toml.tmpl" in files


def test_plugins_are_found_from_wheels_without_torch(python: Path) -> None:
    code = (
        "import sys; from fourfold.plugins import load_plugins\n"
        "registry = load_plugins()\n"
        "print(*registry.warnings, sep='\\n')\n"
        "print(sorted(row.plugin for row in registry.manifest), sorted(registry.executors()))\n"
        "print('torch' in sys.modules)"
    )
    plugins = sorted(name for project in PROJECTS for name in metadata(project)["entry-points"]["fourfold"])
    assert run(python, code).splitlines() == [f"{plugins} ['external', 'mp', 'ray', 'uniproc']", "False"]


def test_a_config_is_built_and_resolved_from_wheels_without_torch(python: Path) -> None:
    code = (
        "from fourfold.config.options import build_engine_config\n"
        "from fourfold.config.resolution import resolve\n"
        "from fourfold.plugins import load_plugins\n"
        "registry = load_plugins()\n"
        "print(resolve(build_engine_config(registry.settings()), registry).config.backends.executor)\n"
    )
    assert run(python, code) == "uniproc"


def test_option_docs_come_with_the_wheel(python: Path) -> None:
    code = (
        "from fourfold.config.engine_config import EngineConfig\n"
        "from fourfold.config.options import OptionSet\n"
        "print(OptionSet((EngineConfig,)).options['tensor_parallel_size'].help)"
    )
    assert run(python, code) == "Ranks that share every layer."
