"""The communicator of shared memory with points at everything that it does."""

from __future__ import annotations

from typing import Any

from fourfold.entries import CommunicatorContext
from fourfold.plugins import load_plugins
from fourfold_faults.points import Points


class FaultyCommunicator:
    """Points: ``comm.build`` and ``comm.NAME`` of every method."""

    def __init__(self, context: CommunicatorContext) -> None:
        self._points = Points(context.ranks[context.rank])
        self._points.reach("comm.build")
        self._inner = load_plugins().communicators()["shm"].build(context)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._points.wrap(f"comm.{name}", found) if callable(found) else found
