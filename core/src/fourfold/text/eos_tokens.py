"""Which tokens end a model's output, from the files of a prepared checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

from fourfold.errors import ConfigError


def load_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of generation_config.json, else of config.json; empty if neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}; fetch or convert the model again") from error
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token_id) is int for token_id in ids):
            return tuple(ids)
    return ()
