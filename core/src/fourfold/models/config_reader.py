"""Typed access to a config.json: a value of the wrong kind is an error that names its key. Knows no model family."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fourfold.errors import ConfigError


class ConfigReader:
    """Reads one config.json; null counts as absent, as the Hugging Face configs mean it."""

    def __init__(self, values: Mapping[str, Any], *, where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to ``most``; required when there is no default."""
        return self._whole(key, self._value(key, default), 1, most)

    def count(self, key: str, default: int, *, most: int) -> int:
        """A whole number from 0 to ``most``."""
        return self._whole(key, self._value(key, default), 0, most)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; required when there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{self.where} has {key}: {value!r}; a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; required when there is no default."""
        value = self.number(key, default)
        if value <= 0:
            raise ConfigError(f"{self.where} has {key}: {value:g}; a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where} has {key}: {value!r}; true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where} has {key}: {value!r}; a string")
        return value

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of at least ``length`` items, or None if absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise ConfigError(f"{self.where} has {key}: {value!r}; a list with an item for each of {length} layers")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where} has {key}: {value!r}; an object")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            means = "a whole number above 0" if least else "0, or a whole number above it"
            raise ConfigError(f"{self.where} has {key}: {value!r}; {means}")
        if value > most:
            raise ConfigError(f"{self.where} has {key}: {value}; {most} at most")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where} has no {key}; add it")
        return value
