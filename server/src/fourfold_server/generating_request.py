"""What the routes that generate read alike of a request, before and after their own fields."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request

from fourfold.text.served_model import ServedModel
from fourfold_server.fields import Table
from fourfold_server.replica_choice import read_rank
from fourfold_server.request_fields import read_request_fields
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
        await state.catch_up()
        model = state.serving()
        rank = read_rank(http.headers, state.client.ranks)
        values, ignored, constants = await read_request_fields(http, state, table)
        return cls(
            state=state,
            http=http,
            arrival=arrival,
            model=model,
            values=values,
            ignored=ignored,
            constants=constants,
            include_usage=read_stream_options(values, strict=state.config.strict_fields, ignored=ignored),
            rank=rank,
        )

    def admit(self) -> int:
        """The context that there is. Raises RequestError; a route's own checks come before, as they name a field."""
        check_constants(self.constants)
        self.state.find_adapter(self.values["model"])  # which refuses a name that nobody has
        return self.state.context_limit()
