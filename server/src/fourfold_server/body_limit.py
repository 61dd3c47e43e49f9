"""Refuses bodies above a size, before they are in memory. Knows no route."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold.errors import RequestError
from fourfold_server.errors import error_response


class BodyLimit:
    """Status 413 for a declared length above the limit, and for a body that grows past it."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on a limited body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdecimal() and int(declared[:19]) > self._max_bytes:
            await error_response(self._refusal(f"{declared} bytes"))(scope, receive, send)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._refusal(f"more than {self._max_bytes} bytes")
            return message

        await self._app(scope, limited_receive, send)

    def _refusal(self, size: str) -> RequestError:
        return RequestError(
            f"the body is {size}; at most {self._max_bytes} are taken (--max-body-bytes)",
            code="request_too_large",
            status=413,
        )
