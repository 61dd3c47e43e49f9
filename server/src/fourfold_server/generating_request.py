"""What the routes that generate read alike of a request, before and after their own fields."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request

from fourfold.text.served_model import ServedModel
from fourfold_server.fields import Table, read_fields
from fourfold_server.json_body import read_json_object
from fourfold_server.replica_choice import read_rank
from fourfold_server.sampling_fields import check_constants, read_stream_options
from fourfold_server.state import ServerState


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratingRequest:
    """One HTTP request whose fields are read."""

    state: ServerState
    http: Request
    arrival: float
    """By the monotonic clock."""
    model: ServedModel
    values: dict[str, Any]
    ignored: list[str]
    """Fields without effect; a route may add more."""
    constants: tuple[str, ...]
    """What in the body is no JSON."""
    include_usage: bool
    rank: int | None
    """The replica that the client wants; None: any."""

    @classmethod
    async def read(cls, state: ServerState, http: Request, table: Table) -> Self:
        """Read the body. Raises RequestError."""
        arrival = time.monotonic()
        model = state.serving()
        rank = read_rank(http.headers, state.client.ranks)
        body = await read_json_object(http, state)
        strict = state.config.strict_fields
        values, ignored = read_fields(table, body.values, strict=strict)
        return cls(
            state=state,
            http=http,
            arrival=arrival,
            model=model,
            values=values,
            ignored=ignored,
            constants=body.constants,
            include_usage=read_stream_options(values, strict=strict, ignored=ignored),
            rank=rank,
        )

    def admit(self) -> int:
        """The context that there is. Raises RequestError; a route's own checks come before, as they name a field."""
        check_constants(self.constants)
        self.state.find_adapter(self.values["model"])  # which refuses a name that nobody has
        return self.state.context_limit()
