"""Hands what signals and a supervisor's thread say to whoever lives on an event loop. Knows neither."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fourfold.messages import EngineReady
from fourfold_server.supervisor import EngineListener, Failure


class Listener(EngineListener, Protocol):
    """Hears of engines, and of the wish to end."""

    def end_requested(self) -> None:
        """A signal, or whoever started this process, wants it to end."""


class LoopListener:
    """A Listener, callable from any thread, for another one that lives on ``loop`` and may come later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._target: asyncio.Future[Listener] = loop.create_future()

    def set_target(self, target: Listener) -> None:
        """Who hears everything, what was said before included. Call once, on the loop."""
        self._target.set_result(target)

    def end_requested(self) -> None:
        """Hand on."""
        self._tell(lambda target: target.end_requested())

    def engine_starting(self, engine: int, incarnation: int) -> None:
        """Hand on."""
        self._tell(lambda target: target.engine_starting(engine, incarnation))

    def engine_ready(self, ready: EngineReady) -> None:
        """Hand on."""
        self._tell(lambda target: target.engine_ready(ready))

    def engine_dead(self, engine: int, reason: str) -> None:
        """Hand on."""
        self._tell(lambda target: target.engine_dead(engine, reason))

    def gave_up(self, failure: Failure) -> None:
        """Hand on."""
        self._tell(lambda target: target.gave_up(failure))

    def _tell(self, what: Callable[[Listener], None]) -> None:
        # Callbacks of a future run in the order in which they were added, also once it is done.
        call_on_loop(self._loop, partial(self._target.add_done_callback, lambda target: what(target.result())))


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call from any thread; nothing happens once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
