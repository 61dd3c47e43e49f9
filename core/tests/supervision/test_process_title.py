from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from pathlib import Path
from fourfold.supervision.process_title import name_process
name_process(*sys.argv[1:3], log_level=sys.argv[3])
logging.getLogger("some.module").info("hello")
logging.getLogger("some.module").warning("careful")
print(Path("/proc/self/cmdline").read_bytes().replace(b"\\0", b" ").decode().strip())
"""


@pytest.mark.parametrize(
    ("label", "level", "title", "messages"),
    [
        ("DP0.PP1.TP3", "info", "fourfold worker DP0.PP1.TP3", ["INFO hello", "WARNING careful"]),
        ("", "warning", "fourfold worker", ["WARNING careful"]),
    ],
)
def test_title_and_prefix_carry_role_and_label(label: str, level: str, title: str, messages: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, "worker", label, level], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == title
    prefix = title.removeprefix("fourfold ")
    lines = [line.partition(" ")[2] for line in result.stderr.splitlines()]
    assert lines == [f"[{prefix}] {message}" for message in messages]
