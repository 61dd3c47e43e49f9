from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold.text.eos_tokens import load_eos_token_ids


def write(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(settings))


def test_generation_config_comes_first(tmp_path: Path) -> None:
    assert load_eos_token_ids(tmp_path) == ()
    write(tmp_path / "config.json", eos_token_id=2)
    assert load_eos_token_ids(tmp_path) == (2,)
    write(tmp_path / "generation_config.json", eos_token_id=[7, 8])
    assert load_eos_token_ids(tmp_path) == (7, 8)


def test_a_file_without_one_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "generation_config.json", eos_token_id=None)
    write(tmp_path / "config.json", eos_token_id=2)
    assert load_eos_token_ids(tmp_path) == (2,)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        load_eos_token_ids(tmp_path)
