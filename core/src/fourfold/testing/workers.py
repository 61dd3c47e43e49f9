"""Workers without a model or torch, small enough to reason about, importable wherever an executor starts them."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.entries import WorkerContext

_PATIENCE = 20.0


class EchoWorker:
    """Answers, fails, waits or leaves, as it is told."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.world_size = context.layout.engine_world_size
        self.was_shut_down = False
        self._finished = threading.Event()

    def who(self) -> tuple[int, int]:
        """(rank, world size)."""
        return self.rank, self.world_size

    def pid(self) -> int:
        """The process that this rank lives in."""
        return os.getpid()

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        """``args`` and ``kwargs`` as they arrived."""
        return {"args": args, "kwargs": kwargs}

    def identity(self, value: Any) -> Any:
        """``value`` itself."""
        return value

    def make_bytes(self, count: int) -> bytes:
        """``count`` bytes of this rank's number."""
        return bytes([self.rank]) * count

    def begin(self, value: Any, *, fails: bool = False) -> DeferredReply:
        """Answer ``value`` some time after ``finish`` was called."""

        def take() -> Any:
            if not self._finished.wait(_PATIENCE):
                raise TimeoutError("nobody called finish")
            if fails:
                raise ValueError(f"rank {self.rank} failed later on purpose")
            return value

        return DeferredReply(take)

    def finish(self) -> None:
        """Let deferred replies come."""
        self._finished.set()

    def fail(self, rank: int) -> int:
        """Raise ValueError on ``rank``; other ranks answer."""
        if rank == self.rank:
            raise ValueError(f"rank {rank} failed on purpose")
        return self.rank

    def wait(self, seconds: float, rank: int) -> int:
        """Answer after ``seconds`` on ``rank``, at once elsewhere."""
        if rank == self.rank:
            threading.Event().wait(seconds)
        return self.rank

    def leave(self, rank: int) -> int:
        """End ``rank`` for good; other ranks answer."""
        if rank == self.rank:
            raise SystemExit(7)
        return self.rank

    def unsendable(self) -> object:
        """Something that cannot travel."""
        return object()

    def shutdown(self) -> None:
        """Note the end."""
        self.was_shut_down = True


class UnbuildableWorker:
    """Cannot be built, on any rank."""

    def __init__(self, context: WorkerContext) -> None:
        raise ValueError(f"rank {context.rank} cannot be built on purpose")


def scaled_rank(worker: EchoWorker, factor: int, *, offset: int = 0) -> int:
    """A function that travels by name: ``rank * factor + offset``."""
    return worker.rank * factor + offset


def plugin_manifest(worker: EchoWorker) -> list[tuple[str, str, str]]:
    """The plugins that this rank finds, as (name, distribution, version)."""
    from fourfold.plugins import load_plugins

    return [(row.plugin, row.distribution, row.version) for row in load_plugins().manifest]


def frozen_objects(worker: object) -> int:
    """How many objects this rank's collector leaves alone."""
    return gc.get_freeze_count()
