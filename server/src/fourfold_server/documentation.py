"""Request and answer shapes for /docs, from the same tables that check requests."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fourfold_server.errors import ErrorBody
from fourfold_server.fields import Table, object_schema


def request_body(table: Table, example: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """For ``openapi_extra``: the JSON body of a route."""
    content = {"application/json": {"schema": object_schema(table), "example": example}}
    return {"requestBody": {"required": required, "content": content}}


def json_answers(answer: type[msgspec.Struct], *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """For ``responses``: the answer, and the error object of all others."""
    content: dict[str, Any] = {"application/json": {"schema": _schema(answer)}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": "The answer, or its events.", "content": content}, **ERROR_ANSWERS}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A schema that stands alone: definitions are put in place of references."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                return inline(definitions[reference.removeprefix("#/$defs/")])
            return {key: inline(item) for key, item in value.items()}
        if isinstance(value, list):
            return [inline(item) for item in value]
        return value

    resolved = inline(schema)
    return resolved if isinstance(resolved, dict) else {}


_ERROR: Final = {"application/json": {"schema": _schema(ErrorBody)}}
ERROR_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request is refused.", "content": _ERROR},
    "5XX": {"description": "The server cannot answer, or not now.", "content": _ERROR},
}
"""For ``responses``: the error object, the same on every route."""
