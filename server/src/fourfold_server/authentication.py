"""Asks for the API key on every route but the probes. Knows nothing else of a request."""

from __future__ import annotations

import hmac
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fourfold.errors import RequestError
from fourfold_server.errors import error_response

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})


class Authentication:
    """``Authorization: Bearer KEY``, compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # Headers are bytes, which the framework shows as latin-1.
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip(" \t").encode("latin-1"), self._api_key):
                error = RequestError(
                    "the API key is missing or wrong; every path but the probes, /docs too, needs the header "
                    "'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    status=401,
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
