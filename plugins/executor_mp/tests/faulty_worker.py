"""A worker that fails where it is told to; ranks import it by name."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from fourfold.entries import WorkerContext
from fourfold.testing.workers import EchoWorker

FAULT = "FAULTY_WORKER"
"""Environment: ``<rank>:<what>`` happens while that rank builds its worker."""


def happen(what: str) -> None:
    if what == "raise":
        raise ValueError("on purpose")
    if what == "hang":
        threading.Event().wait(60)
    if what == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.Signals[what])


class FaultyWorker(EchoWorker):
    """An EchoWorker with faults."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.context = context
        rank, _, what = os.environ.get(FAULT, "").partition(":")
        if rank == str(context.rank):
            happen(what)

    def load_model(self, rank: int, what: str) -> int:
        """Something happens on ``rank``; the other ranks answer at once."""
        if rank == self.rank:
            happen(what)
        return self.rank

    def lose_peer(self, rank: int, seconds: float) -> int:
        """``rank`` is killed ``seconds`` after the other ranks have noticed, as one that holds its memory for long."""
        if rank != self.rank:
            raise ConnectionError("the peer is gone")
        threading.Event().wait(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    def meet(self) -> list[str]:
        """What every rank wrote in the store that they share."""
        assert self.context.open_store is not None
        store: Any = self.context.open_store()
        store.set(f"rank-{self.rank}", f"{self.rank}")
        return [store.get(f"rank-{rank}").decode() for rank in range(self.world_size)]

    def local_rank(self) -> tuple[int, int]:
        """Where it believes to be."""
        return self.context.dp_rank, self.context.local_rank
