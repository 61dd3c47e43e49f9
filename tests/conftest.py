"""Wheels of all distributions, built once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .distributions import PROJECTS


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One wheel a project."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, *PROJECTS], check=True)
    return sorted(out.glob("*.whl"))


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the source tree cannot help."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": str(tmp_path)}
