"""Echoes X-Request-Id and counts answers. The outermost layer: it sees every answer, refusals too."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold_server.metrics import Metrics

MAX_ID_LENGTH = 256
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class RequestIdentity:
    """Every answer carries ``x-request-id``: the client's own, or one that is drawn."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_LENGTH
        request_id = given if usable else secrets.token_hex(16)

        async def identified_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._metrics.count_http(method, _route_path(scope), message["status"])
            await send(message)

        await self._app(scope, receive, identified_send)


def _route_path(scope: Scope) -> str:
    """The route's pattern: a path that clients make up would be a new series for each."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", "unmatched"))
