"""Turns what a user wrote into a field's type: one reader for command line, environment, file and Python."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Union

from fourfold.errors import ConfigError

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


class ValueRefusedError(ValueError):
    """What a value should have been, to be completed with the option's name and where the value came from."""


def parse_value(annotation: Any, value: object, *, is_size: bool = False) -> Any:
    """``value`` as ``annotation``: a string as a user types it, or a value that has the type already.

    ``is_size`` reads byte sizes such as 2GiB. Raises ValueRefusedError saying what is accepted.
    """
    accepted, optional = split_optional(annotation)
    if value is None:
        if optional:
            return None
        raise ValueRefusedError(f"takes {describe(annotation, is_size=is_size)}")
    origin = typing.get_origin(accepted)
    if origin is Literal:
        return _parse_choice(typing.get_args(accepted), value)
    if origin is tuple:
        items = split_list(value) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ValueRefusedError(f"takes {describe(annotation)}")
        return tuple(parse_value(typing.get_args(accepted)[0], item) for item in items)
    if accepted is bool:
        return _parse_bool(value)
    if accepted is int and is_size and isinstance(value, str):
        return _parse_size(value)
    if accepted in (int, float):
        return _parse_number(accepted, value)
    if not isinstance(value, (str, accepted)) or (accepted is Path and value == ""):  # Path("") is the current folder
        quote = "; put it in quotes" if isinstance(value, (int, float)) else ""  # as YAML reads what looks like one
        raise ValueRefusedError(f"takes {describe(annotation)}{quote}")
    _check_text(str(value))
    return accepted(value)


def split_list(text: str) -> list[str]:
    """The items of a list that was typed as one text."""
    return [item.strip() for item in text.split(",")]


def is_list(annotation: Any) -> bool:
    """Whether an option takes several values."""
    return typing.get_origin(split_optional(annotation)[0]) is tuple


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """``X | None`` as (X, True), anything else as (itself, False)."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        rest = [one for one in typing.get_args(annotation) if one is not types.NoneType]
        if len(rest) == 1 and len(typing.get_args(annotation)) == 2:
            return rest[0], True
    return annotation, False


def describe(annotation: Any, *, is_size: bool = False) -> str:
    """What an option takes, in words."""
    accepted, _ = split_optional(annotation)
    if typing.get_origin(accepted) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(accepted)))
    if typing.get_origin(accepted) is tuple:
        return "a list, with commas between its items"
    if is_size:
        return "a size such as 2GiB, 512MiB or a number of bytes"
    return {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(accepted, "text")


def check_field_types(owner: type[Any]) -> None:
    """Raise ConfigError for a field whose type no option can have."""
    for name, annotation in field_types(owner).items():
        accepted, _ = split_optional(annotation)
        if typing.get_origin(accepted) is tuple:
            arguments = typing.get_args(accepted)
            accepted = arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else accepted
        if accepted not in (str, int, float, bool, Path) and typing.get_origin(accepted) is not Literal:
            raise ConfigError(
                f"{owner.__name__}.{name} is of type {annotation}, which no option can have; "
                "use str, int, float, bool, Path, Literal, tuple[X, ...] or X | None"
            )


def field_types(owner: type[Any]) -> dict[str, Any]:
    """Field name -> type, with annotations that are strings looked up."""
    hints = typing.get_type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner)}


def _check_text(text: str) -> None:
    """Refuse what no configuration file, HTTP header or log can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueRefusedError("takes text that is UTF-8") from error
    if "\0" in text:
        raise ValueRefusedError("takes text without null characters")


def _parse_choice(choices: tuple[Any, ...], value: object) -> Any:
    for choice in choices:
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    raise ValueRefusedError("takes one of " + ", ".join(map(str, choices)))


def _parse_bool(value: object) -> bool:
    word = str(value).lower()
    if isinstance(value, (bool, str)) and word in _TRUE + _FALSE:
        return word in _TRUE
    raise ValueRefusedError("takes true or false")


def _parse_number(kind: type[int] | type[float], value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(value)
        number = kind(value)
    except (ValueError, OverflowError) as error:
        raise ValueRefusedError(f"takes {describe(kind)}") from error
    # kind(2.5) is 2 without a word; a value from Python or YAML must not lose its fraction
    lost = isinstance(value, float) and number != value
    if lost or (isinstance(number, float) and not math.isfinite(number)):
        raise ValueRefusedError(f"takes {describe(kind)}")
    return _checked_width(number)


def _checked_width(number: float) -> float:
    # Configs travel between processes, and so do counts in messages, as 64-bit integers.
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueRefusedError("takes a whole number below 2**63")
    return number


def _parse_size(text: str) -> int:
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if matched is None or matched[2] not in _UNITS:
        raise ValueRefusedError(f"takes {describe(int, is_size=True)}")
    unit = _UNITS[matched[2]]
    return int(_checked_width(int(float(matched[1]) * unit) if "." in matched[1] else int(matched[1]) * unit))
