from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from fourfold.checkpoints.conversion_cache import converted_folder, default_cache_folder, make_once
from fourfold.errors import CheckpointError


def fill(folder: Path) -> None:
    (folder / "x").write_text("whole")


def test_made_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert make_once(target, fill) == target
    assert (target / "x").read_text() == "whole"

    def never(folder: Path) -> None:
        raise AssertionError("it is there already")

    assert make_once(target, never) == target


def test_failure_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def broken(folder: Path) -> None:
        fill(folder)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        make_once(target, broken)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    make_once(target, fill)


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with (tmp_path / ".model.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"another process has been converting .* holds .*\.model\.lock"):
            make_once(tmp_path / "model", fill, timeout=0.05)
    make_once(tmp_path / "model", fill, timeout=5)


def test_waits_for_the_one_at_work(tmp_path: Path) -> None:
    target, started, go_on, calls = tmp_path / "model", threading.Event(), threading.Event(), []

    def slow(folder: Path) -> None:
        calls.append(folder)
        started.set()
        assert go_on.wait(10)
        fill(folder)

    first = threading.Thread(target=make_once, args=(target, slow))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=make_once, args=(target, slow))
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(calls) == 1
    assert (target / "x").exists()


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the converted model cannot be kept in .*/file/model"):
        make_once(tmp_path / "file" / "model", fill)


def test_another_state_of_the_source_is_another_folder(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_text("1")
    first = converted_folder(tmp_path, source, 1)
    assert first.name.startswith("a-")
    assert first == converted_folder(tmp_path, source, 1)
    assert first != converted_folder(tmp_path, source, 2)
    source.write_text("12")
    assert first != converted_folder(tmp_path, source, 1)


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == f"{tmp_path}/fourfold/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert default_cache_folder() == "/somewhere/.cache/fourfold/models"
