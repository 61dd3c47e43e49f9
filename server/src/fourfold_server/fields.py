"""Tables of request fields: what each may hold, how it is read, what the documentation says. Knows no route."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fourfold.errors import RequestError

Schema = dict[str, Any]
MAX_INTEGER = 2**63 - 1


class Kind(NamedTuple):
    """A type of value."""

    read: Callable[[str, Any], Any]
    """``read(path, value)`` returns the value as used, or raises RequestError that names ``path``."""
    schema: Schema
    """Its JSON schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a request. A null is the same as no field."""

    kind: Kind
    doc: str
    default: Any = None
    required: bool = False
    only: tuple[Any, ...] | None = None
    """The values that work; the kind may hold others, which are refused."""
    effective: bool = True
    """False: valid by the OpenAI API, accepted, and without effect here, as the reply's header says."""


Table = Mapping[str, Field]


class Fields(NamedTuple):
    """A request's fields as read."""

    values: dict[str, Any]
    """Every field of the table; those not sent have their default."""
    ignored: list[str]
    """Fields that were sent and have no effect."""


def read_fields(table: Table, body: Mapping[str, Any], *, strict: bool, path: str = "") -> Fields:
    """Check and read every field. With ``strict`` a field that the table lacks is refused. Raises RequestError."""
    values: dict[str, Any] = {}
    for name, field in table.items():
        values[name] = _read_field(field, path + name, body.get(name))
    ignored: list[str] = []
    for name, value in body.items():
        known = table.get(name)
        if known is None and strict:
            raise RequestError(f"{path}{name} is no field of this request", parameter=path + name)
        if known is None or (not known.effective and value is not None):
            ignored.append(path + name)
    return Fields(values, ignored)


def _read_field(field: Field, path: str, value: Any) -> Any:
    if value is None:
        if field.required:
            raise RequestError(f"{path} is missing or null; it must be {field.doc.rstrip('.')}", parameter=path)
        return field.default
    value = field.kind.read(path, value)
    if field.only is not None and value not in field.only:
        supported = ", ".join(repr(one) for one in field.only if one not in ("", []))
        hint = f"supported: {supported}" if supported else "leave it out"
        raise RequestError(f"{path} is {shown(value)}, which is not supported yet; {hint}", parameter=path)
    return value


def object_schema(table: Table) -> Schema:
    """The JSON schema of a request body."""
    properties = {}
    for name, field in table.items():
        schema = {**field.kind.schema, "description": field.doc[:1].upper() + field.doc[1:]}
        if field.default is not None:
            schema["default"] = field.default
        properties[name] = schema
    required = [name for name, field in table.items() if field.required]
    return {"type": "object", "properties": properties, "required": required}


def wrong_type(path: str, value: Any, expected: str) -> RequestError:
    """The error for a value of another type."""
    return RequestError(f"{path} is {shown(value)}; {expected}", parameter=path)


def shown(value: Any) -> str:
    """``value`` as errors quote it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_integer(path: str, value: Any) -> int:
    # bool is a subclass of int, and no integer to whoever sends true.
    if type(value) is not int or not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise wrong_type(path, value, "an integer of 64 bits is needed")
    return value


def _read_number(path: str, value: Any) -> float:
    if type(value) is int and abs(value) <= MAX_INTEGER:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise wrong_type(path, value, "a finite number is needed")
    return value


def _read_boolean(path: str, value: Any) -> bool:
    if type(value) is not bool:
        raise wrong_type(path, value, "true or false is needed")
    return value


def _read_string(path: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(path, value, "a string is needed")
    return value


def _read_object(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object is needed")
    return value


def _read_anything(path: str, value: Any) -> Any:
    return value


INTEGER = Kind(_read_integer, {"type": "integer"})
NUMBER = Kind(_read_number, {"type": "number"})
BOOLEAN = Kind(_read_boolean, {"type": "boolean"})
STRING = Kind(_read_string, {"type": "string"})
OBJECT = Kind(_read_object, {"type": "object"})
ANYTHING = Kind(_read_anything, {})


def list_of(item: Kind) -> Kind:
    """A list whose items are all of one kind."""

    def read(path: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, value, "a list is needed")
        return [item.read(f"{path}[{index}]", element) for index, element in enumerate(value)]

    return Kind(read, {"type": "array", "items": item.schema})


def one_or_list_of(item: Kind) -> Kind:
    """One value, or a list of them; read as a list."""
    several = list_of(item)

    def read(path: str, value: Any) -> list[Any]:
        items: list[Any] = several.read(path, value if isinstance(value, list) else [value])
        return items

    return Kind(read, {"anyOf": [item.schema, several.schema]})


def refused(doc: str, *, harmless: Sequence[Any] = ()) -> Field:
    """A field that clients know and that does nothing here: only values that ask for nothing are taken."""
    return Field(kind=ANYTHING, doc=f"{doc} Not supported yet.", only=tuple(harmless))


def without_effect(kind: Kind, doc: str) -> Field:
    """A field that cannot change the answer, such as who the user is."""
    return Field(kind=kind, doc=f"{doc} Has no effect.", effective=False)
