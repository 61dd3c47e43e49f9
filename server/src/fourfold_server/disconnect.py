"""Notices at once when a client goes away, whatever the server is waiting for meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class DisconnectWatch:
    """Calls back once when the client disconnects; the body must have been read."""

    def __init__(self, receive: Receive, callback: Callable[[], None]) -> None:
        self._receive = receive
        self._callback = callback
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._callback()

    def stop(self) -> None:
        """Watch no longer. Twice is harmless."""
        self._task.cancel()
