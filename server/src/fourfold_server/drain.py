"""Which HTTP requests are being answered right now, and waiting for them to end. Knows nothing of what they ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class ActiveRequests:
    """An ASGI application around another that keeps count. Used on one event loop only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._active: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ended = asyncio.get_running_loop().create_future()
        self._active.add(ended)
        try:
            await self._app(scope, receive, send)
        finally:
            self._active.discard(ended)
            ended.set_result(None)

    def __len__(self) -> int:
        return len(self._active)

    async def wait(self, timeout: float) -> int:
        """Wait until the requests of this moment have ended; returns how many have not after ``timeout`` seconds.

        Later ones are not waited for, so that probes cannot hold up a drain.
        """
        if not self._active:
            return 0
        _, pending = await asyncio.wait(set(self._active), timeout=timeout)
        return len(pending)
