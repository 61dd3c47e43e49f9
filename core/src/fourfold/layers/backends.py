"""Chooses and builds backends; with ``auto``, one that cannot do this model gives way to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fourfold.errors import ConfigError, Unsupported
from fourfold.selection import AUTO, select, suitability

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.entries import Entry

_log = logging.getLogger(__name__)
Built = TypeVar("Built")


def build_backend(
    kind: str,
    entries: Mapping[str, Any],
    name: str,
    config: EngineConfig,
    build: Callable[[Entry[Any]], Built],
) -> tuple[str, Built]:
    """The chosen entry's name and what ``build`` makes of it; ``kind`` is a noun for messages.

    Raises ConfigError when the named entry, or every entry that ``auto`` may take, raises Unsupported.
    """
    remaining = entries
    while True:
        entry = select(kind, remaining, name, config).entry
        try:
            return entry.name, build(entry)
        except Unsupported as error:
            remaining = {key: other for key, other in remaining.items() if other is not entry}
            if name != AUTO or not remaining:
                raise ConfigError(f"{kind} {entry.name!r} cannot run this model: {error}") from error
            _log.warning("%s %r cannot run this model, taking the next one: %s", kind, entry.name, error)


def log_passed_over(config: EngineConfig, offered: Mapping[str, Mapping[str, Entry[Any]]]) -> None:
    """Say which of ``offered`` (kind -> name -> entry) cannot run here: one line a reason, such as no compiler."""
    reasons: dict[str, list[str]] = {}
    for kind, entries in offered.items():
        for name, entry in entries.items():
            suits = suitability(entry, config)
            if suits.score <= 0:
                reasons.setdefault(suits.reason, []).append(f"{kind} {name!r}")
    for reason, names in reasons.items():
        _log.info("not used: %s: %s", ", ".join(names), reason)
