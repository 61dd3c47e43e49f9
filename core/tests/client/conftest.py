from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """Short, because a socket's path may have about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        yield Path(folder)
