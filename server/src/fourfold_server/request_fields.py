"""Reads the body of a request by a table of fields. Knows no field."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from fourfold_server.fields import Table, read_fields
from fourfold_server.json_body import INLINE_BYTES, read_json_object
from fourfold_server.state import ServerState


class RequestFields(NamedTuple):
    """See ``Fields`` and ``JsonObject``."""

    values: dict[str, Any]
    ignored: list[str]
    constants: tuple[str, ...]


async def read_request_fields(http: Request, state: ServerState, table: Table) -> RequestFields:
    """Read and check the body; a large one off the event loop. Raises RequestError."""
    body = await read_json_object(http, state)
    read = partial(read_fields, table, body.values, strict=state.config.strict_fields)
    fields = read() if body.num_bytes <= INLINE_BYTES else await state.text_pool.run(read)
    return RequestFields(fields.values, fields.ignored, body.constants)
