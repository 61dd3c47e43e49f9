"""The seam between a worker that starts work and an executor that does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeferredReply:
    """What a worker method may return in place of its reply: how to get it.

    The executor calls ``take`` once, from any thread, and may meanwhile call other methods of the worker; what ``take``
    raises is the method's own error. ``fourfold.serialization.encode`` takes it too, which waits there and then.
    """

    __slots__ = ("take",)

    def __init__(self, take: Callable[[], Any]) -> None:
        self.take = take
        """Waits for the reply and returns it."""
