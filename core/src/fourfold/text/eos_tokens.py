"""Which tokens end a model's output, from the files of a prepared checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from fourfold.checkpoints.json_file import read_json


def load_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of generation_config.json, else of config.json; empty if neither names one.

    Raises CheckpointError for a file that is no JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token_id) is int for token_id in ids):
            return tuple(ids)
    return ()
