"""Hands what signals and other threads say to whoever lives on an event loop. Knows none of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Protocol

from fourfold.process_messages import EngineNotice
from fourfold_server.supervised_process import Failure


class Listener(Protocol):
    """Hears what concerns the deployment."""

    def engine_changed(self, notice: EngineNotice) -> None:
        """An engine starts, is ready, drains or is dead."""

    def server_ready(self) -> None:
        """Another process, which is no engine, does its work."""

    def take_connection(self, connection: socket) -> None:
        """A client has connected."""

    def gave_up(self, failure: Failure) -> None:
        """The deployment cannot go on. Said once at most."""

    def end_requested(self) -> None:
        """A signal, or whoever started this process, wants it to end."""


class LoopListener:
    """A Listener, callable from any thread, for another one that lives on ``loop`` and may come later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._target: asyncio.Future[Listener] = loop.create_future()
        self.end_wish: asyncio.Future[None] = loop.create_future()
        """Done once the end was requested, target or not."""

    def set_target(self, target: Listener) -> None:
        """Who hears everything, what was said before included. Call once, on the loop."""
        self._target.set_result(target)

    def engine_changed(self, notice: EngineNotice) -> None:
        """Hand on."""
        self._tell(lambda target: target.engine_changed(notice))

    def server_ready(self) -> None:
        """Hand on."""
        self._tell(lambda target: target.server_ready())

    def take_connection(self, connection: socket) -> None:
        """Hand on."""
        self._tell(lambda target: target.take_connection(connection))

    def gave_up(self, failure: Failure) -> None:
        """Hand on."""
        self._tell(lambda target: target.gave_up(failure))

    def end_requested(self) -> None:
        """Hand on."""
        call_on_loop(self._loop, self._note_end)
        self._tell(lambda target: target.end_requested())

    def _note_end(self) -> None:
        if not self.end_wish.done():
            self.end_wish.set_result(None)

    def _tell(self, what: Callable[[Listener], None]) -> None:
        # Callbacks of a future run in the order in which they were added, also once it is done.
        call_on_loop(self._loop, partial(self._target.add_done_callback, lambda target: what(target.result())))


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call from any thread; nothing happens once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
