"""The methods of an engine core that are called by name: by API servers over sockets, and by ``LLM``. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from fourfold.coordinator.waves import PauseMode
from fourfold.errors import RequestError

OPERATIONS: Final[Mapping[str, bool]] = {
    "check_weights": False,
    "discard_weights": True,
    "layer_report": False,
    "load_adapter": False,
    "load_weights": True,
    "pause": False,
    "reset_prefix_cache": False,
    "resume": False,
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
    return [("pause", {"mode": "keep"}), ("sleep", {"level": level})]


def wake_calls(tags: Sequence[str]) -> list[Call]:
    """The same for waking up, of engines that may be awake; they go on when nothing sleeps any more."""
    return [("pause", {"mode": "keep"}), ("wake_up", {"tags": list(tags)}), ("resume", {})]


def update_calls(model: str) -> list[Call]:
    """The same for new weights, after ``check_weights`` has succeeded everywhere."""
    return [("pause", {"mode": "keep"}), ("discard_weights", {}), ("load_weights", {"model": model}), ("resume", {})]


def check_mode(mode: str) -> None:
    """Raise RequestError for what is no ``PauseMode``."""
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode is {mode!r:.100}; there are {', '.join(get_args(PauseMode))}", parameter="mode")
