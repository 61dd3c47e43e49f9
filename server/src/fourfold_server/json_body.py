"""Reads a request body as one strict JSON object. Knows no fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from fourfold.errors import RequestError
from fourfold_server.state import ServerState

BODY_DEADLINE_SECONDS = 60.0
"""From the headers to the last byte of the body."""
MAX_DEPTH = 100
"""Lists and objects within each other; what handles values later calls itself for each level."""
INLINE_BYTES = 65536
"""Larger bodies are parsed off the event loop."""
MAX_COMMAS = 1_000_000
"""Parsing lists lets no other thread run, and so many values take some 50 ms."""


TOO_DEEP = f"the body is nested too deeply; {MAX_DEPTH} levels at most"


class JsonObject(NamedTuple):
    """One parsed body."""

    values: dict[str, Any]
    constants: tuple[str, ...]
    """NaN, Infinity or -Infinity, where the body has them. They are no JSON, but the field at fault is named first."""
    num_bytes: int


async def read_json_object(request: Request, state: ServerState) -> JsonObject:
    """The body of a request. Raises RequestError for anything but one JSON object in UTF-8 with distinct keys."""
    _check_content_type(request.headers.get("content-type"))
    _check_content_encoding(request.headers.get("content-encoding"))
    try:
        async with asyncio.timeout(BODY_DEADLINE_SECONDS) as timeout:
            state.body_timeouts.add(timeout)
            try:
                body = await request.body()
            finally:
                state.body_timeouts.discard(timeout)
    except TimeoutError as error:
        state.serving()  # which refuses when this server has begun to shut down
        raise RequestError(f"the client sent no whole body within {BODY_DEADLINE_SECONDS:g} s", status=408) from error
    except ClientDisconnect as error:
        raise RequestError("the client disconnected before its body was whole") from error
    if len(body) <= INLINE_BYTES:
        return parse_json_object(body)
    return await state.text_pool.run(parse_json_object, body)


def parse_json_object(body: bytes) -> JsonObject:
    """Parse and check. Raises RequestError."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object")
    if body.count(b",") > MAX_COMMAS:
        raise RequestError(f"the body has more than {MAX_COMMAS} commas; send fewer values at a time")
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=constant)
    except RecursionError as error:
        raise RequestError(TOO_DEEP) from error
    except ValueError as error:
        # JSONDecodeError, UnicodeDecodeError, and integers of thousands of digits.
        raise RequestError(f"the body is not valid JSON: {error}") from error
    # Counting is quick, and few bodies have so many brackets.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(MAX_DEPTH, value):
        raise RequestError(TOO_DEEP)
    if b"\\ud" in body.lower():
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {_JSON_NAMES[type(value)]}; send an object")
    return JsonObject(value, tuple(constants), len(body))


_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(f"the body has the key {twice!r} twice", parameter=twice)
    return values


def _deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit):
        children = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for items in children for child in items if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _check_surrogates(value: Any) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the body has an escape for half of a surrogate pair, which is no text") from error


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(f"content-type is {content_type!r}; send application/json")
    for parameter in parameters.split(";"):
        name, _, charset = parameter.strip().lower().partition("=")
        if name == "charset" and charset.strip('"') not in ("utf-8", "utf8"):
            raise RequestError(f"content-type is {content_type!r}; JSON travels as utf-8")


def _check_content_encoding(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise RequestError(f"content-encoding is {encoding!r}; send the body as it is", status=415)
