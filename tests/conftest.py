"""Wheels of all distributions, and the plugin of faults, built once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .distributions import PROJECTS

FAULTS_PLUGIN = Path(__file__).parent / "faults_plugin"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One wheel a project."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, *PROJECTS], check=True)
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which the plugin of faults is installed."""
    folder = tmp_path_factory.mktemp("faults")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels", FAULTS_PLUGIN]
    subprocess.run([*pip, *build], check=True)
    wheels = (folder / "wheels").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", *wheels], check=True)
    return folder / "site"


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the source tree cannot help."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": str(tmp_path)}
