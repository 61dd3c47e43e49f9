"""The methods of an engine core that are called by name: by API servers over sockets, and by ``LLM``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OPERATIONS: Final[Mapping[str, bool]] = {
    "check_weights": False,
    "discard_weights": True,
    "halt": True,
    "layer_report": False,
    "load_adapter": False,
    "load_weights": True,
    "reset_prefix_cache": False,
    "sleep": True,
    "unload_adapter": False,
    "wake_up": True,
}
"""Name -> whether no step may be in the air meanwhile."""

Call = tuple[str, dict[str, Any]]
"""A method of the core and its arguments."""


def sleep_calls(level: int) -> list[Call]:
    """What all engines do in turn, each when all have done the one before: no replica computes while another one lets
    go of weights that they share.
    """
    return [("halt", {}), ("sleep", {"level": level})]


def update_calls(model: str) -> list[Call]:
    """The same for new weights, after ``check_weights`` has succeeded everywhere."""
    return [("halt", {}), ("discard_weights", {}), ("load_weights", {"model": model})]
