"""A worker that fails where it is told to; ranks import it by name."""

from __future__ import annotations

import os
import threading
from typing import Any

from fourfold.entries import WorkerContext
from fourfold.testing.workers import EchoWorker

FAULT = "FAULTY_WORKER"
"""Environment: the rank that does what it should not while it builds its worker, and what: ``1:raise``."""


class FaultyWorker(EchoWorker):
    """An EchoWorker with faults, which also tells where it is."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.context = context
        rank, _, what = os.environ.get(FAULT, "").partition(":")
        if rank == str(context.rank):
            if what == "raise":
                raise ValueError("on purpose")
            if what == "exit":
                os._exit(9)
            threading.Event().wait(60)

    def place(self) -> tuple[str, int, int]:
        """(node, local rank, local workers)."""
        return self.context.node, self.context.local_rank, self.context.local_workers

    def variables(self, names: list[str]) -> list[str | None]:
        """Of this rank's environment."""
        return [os.environ.get(name) for name in names]

    def meet(self) -> list[str]:
        """What every rank wrote in the store that they share."""
        assert self.context.open_store is not None
        store: Any = self.context.open_store()
        store.set(f"rank-{self.rank}", f"{self.rank}")
        return [store.get(f"rank-{rank}").decode() for rank in range(self.world_size)]
