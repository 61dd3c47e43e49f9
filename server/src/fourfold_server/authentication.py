"""Who may do what: the API key for every route but the probes, and without one no operations from elsewhere."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fourfold.errors import RequestError
from fourfold_server.errors import error_response

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})

_ADMIN_PATHS: Final = ("/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


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


class LocalAdministration:
    """For a server without an API key that others than this host reach: refuses operators' routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer 403."""
        if scope["type"] == "http" and _is_admin(scope["path"]):
            error = RequestError(
                f"{scope['path']} needs an API key, or a server that listens on this host alone; serve with --api-key",
                code="admin_routes_closed",
                status=403,
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether nobody but this host reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_admin(path: str) -> bool:
    return any(path == admin or path.startswith(admin + "/") for admin in _ADMIN_PATHS)
