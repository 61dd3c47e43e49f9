from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.shared_memory import HUGE_PAGE, VARIABLE, SharedMemory, SharedRegion, shared_region


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemory]:
    memory = SharedMemory()
    monkeypatch.setenv(VARIABLE, memory.environment[VARIABLE])
    yield memory
    memory.close()
    memory.close()


def region(rank: int = 0) -> SharedRegion:
    found = shared_region(rank)
    assert found is not None
    return found


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("fourfold-shared")


@pytest.mark.usefixtures("memory")
def test_replicas_see_what_each_other_writes_and_other_ranks_do_not() -> None:
    one, other, elsewhere = region(), region(), region(rank=1)
    first, second = one.take(10), one.take(HUGE_PAGE + 1)
    assert (len(first), len(second)) == (HUGE_PAGE, 2 * HUGE_PAGE)
    first[5], second[HUGE_PAGE] = b"a", b"b"
    assert other.take(10)[5] == b"a"
    assert other.take(HUGE_PAGE + 1)[HUGE_PAGE] == b"b"
    assert elsewhere.take(10)[5] == b"\0"


@pytest.mark.usefixtures("memory")
def test_memory_lives_as_long_as_it_is_used() -> None:
    files = len(os.listdir("/proc/self/fd"))
    one = region()
    piece = one.take(10)
    assert mapped() == 1
    del one
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    piece[0] = b"x"
    del piece
    gc.collect()
    assert mapped() == 0


def test_another_process_finds_it_and_it_outlives_its_maker(memory: SharedMemory) -> None:
    piece = region().take(10)
    code = (
        "from fourfold.shared_memory import shared_region\n"
        "piece = shared_region(0).take(10)\n"
        "assert piece[3] == b'm', piece[3]\n"
        "piece[4] = b'c'\n"
    )
    piece[3] = b"m"
    subprocess.run([sys.executable, "-c", code], check=True)
    memory.close()
    assert piece[4] == b"c"
    assert shared_region(0) is None


def test_without_replicas_there_is_none() -> None:
    assert VARIABLE not in os.environ
    assert shared_region(0) is None


@pytest.mark.usefixtures("memory")
def test_one_holds_the_lock_at_a_time() -> None:
    code = (
        "import fcntl, os, sys\n"
        f"descriptor = os.open(os.environ[{VARIABLE!r}], os.O_RDWR)\n"
        "try:\n"
        "    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n"
        "    sys.exit(3)\n"
    )
    one = region()
    with one.locked():
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
