from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, socket, subprocess, sys
from fourfold.supervision.standard_streams import open_standard_streams
open_standard_streams()
socket_number = socket.socket().fileno()
print("lost", file=sys.stderr)
print("lost")
child = "import os; [os.fstat(descriptor) for descriptor in range(3)]"
status = subprocess.run([sys.executable, "-c", child]).returncode
with open(sys.argv[1], "w") as file:
    file.write(f"{socket_number > 2} {status} {sys.stdin.read()!r}")
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_opened_for_this_process_and_its_children(tmp_path: Path, closed: str) -> None:
    result = tmp_path / "result"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, str(result)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
    assert result.read_text() == "True 0 ''"
