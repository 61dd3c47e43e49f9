"""The commands that make models and adapters to try things with refuse in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fourfold.testing import lora_adapter, upcycling


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        (upcycling, ["new", "--top-k", "5"], "--top-k is 5, and --num-experts 4; from 1 to as many"),
        (upcycling, ["new", "--model", "nope"], "no model called 'nope'"),
        (upcycling, ["."], "is not empty; name a new folder"),
        (lora_adapter, ["new", "--rank", "0"], "--rank is 0; 1 or more"),
        (lora_adapter, ["new", "--model", "nope"], "no model called 'nope'"),
        (lora_adapter, ["."], ". is already there; name a new folder"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(module, arguments, text, monkeypatch, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert not Path("new").exists()
