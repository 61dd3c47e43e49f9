"""The kernels' numbers on a CPU, by Triton's interpreter: in processes of their own, since it is a choice for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", ["attention", "experts", "linear", "operators"])
def test_interpreted(cases):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"interpreted_{cases}.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
