"""Reads a JSON object from a file of a checkpoint, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from fourfold.errors import CheckpointError

MAX_BYTES: Final = 64 << 20
"""Far beyond any; parsing takes the engine's time."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError where it is missing, unreadable, too large or no JSON object."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; a JSON file of a checkpoint has {MAX_BYTES} at most")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}; fetch or convert the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}; a JSON object")
    return value
