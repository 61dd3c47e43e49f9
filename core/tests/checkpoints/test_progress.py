from __future__ import annotations

import logging
import sys

import pytest

from fourfold.checkpoints.progress import LogProgress, RichProgress, make_progress


def test_log_lines_at_every_quarter(caplog: pytest.LogCaptureFixture) -> None:
    progress = LogProgress(logging.getLogger("test"))
    with caplog.at_level(logging.INFO, "test"):
        progress.task("loading weights", 272)
        for _ in range(272):
            progress.advance(1)
        progress.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"loading weights: {step}" for step in ("started", "68 of 272", "136 of 272", "204 of 272", "272 of 272")
    ]


def test_an_empty_task(caplog: pytest.LogCaptureFixture) -> None:
    progress = LogProgress()
    progress.task("nothing", 0)
    progress.advance(1)


def test_a_bar_can_be_replaced_and_closed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress()
    progress.advance(1)
    progress.task("one", 2)
    progress.advance(2)
    progress.task("two", 1)
    progress.close()
    progress.close()
    assert capsys.readouterr().out == "", "standard output belongs to the program"


def test_a_bar_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(make_progress(), RichProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert isinstance(make_progress(), LogProgress)
