"""The worker with points at its methods, and at the collectives of its steps."""

from __future__ import annotations

from typing import Any

from fourfold.entries import WorkerContext
from fourfold.worker.worker import Worker
from fourfold_faults.points import Points

METHODS = ("initialize_cache", "warm_up", "execute_model", "check_health")
COLLECTIVES = ("all_reduce", "gather", "broadcast")


class FaultyWorker(Worker):
    """Points: ``construction``, ``load``, ``loaded``, those of METHODS, and ``collective.NAME`` within steps."""

    def __init__(self, context: WorkerContext) -> None:
        self._points = Points(context.rank)
        self._points.reach("construction")
        super().__init__(context)
        self._runs_steps = False
        for name in METHODS:
            setattr(self, name, self._points.wrap(name, getattr(self, name)))

    def load(self) -> bytes:
        """See Worker."""
        self._points.reach("load")
        info = super().load()
        assert self._loaded is not None
        communicator: Any = self._loaded.parallel.tp.communicator
        for name in COLLECTIVES if communicator is not None else ():
            self._watch(communicator, name)
        self._points.reach("loaded")
        return info

    def execute_model(self, message: bytes) -> bytes:
        """See Worker."""
        self._runs_steps = True
        return super().execute_model(message)

    def _watch(self, communicator: Any, name: str) -> None:
        plain = getattr(communicator, name)
        watched = self._points.wrap(f"collective.{name}", plain)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (watched if self._runs_steps else plain)(*args, **kwargs)

        setattr(communicator, name, call)
