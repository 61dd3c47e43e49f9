"""Communicators whose pipes are bad, each in its own way, but correct: over those of shared memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fourfold.distributed.buffered_pipe import BufferedReceiver, BufferedSender
from fourfold.entries import CommunicatorContext
from fourfold.plugins import load_plugins

DELAY = 0.05
"""Seconds that a delayed copy is late."""
LONGEST = 0.02
"""Seconds that a slow one takes at most."""
_TOKEN = torch.zeros(1, dtype=torch.uint8)


class Later:
    """See ``fourfold.contracts.communicator.Handle``: what a thread of the pipe does."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> None:
        """See Handle."""
        self._future.result(timeout)


class OnWait:
    """A Handle of what is only done when it is waited for."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def wait(self, timeout: float | None = None) -> None:
        """See Handle."""
        self._call()


class OddTransport:
    """The communicator of shared memory, but for its pipes. Subclasses say what is odd about a message."""

    def __init__(self, context: CommunicatorContext) -> None:
        self._inner = load_plugins().communicators()["shm"].build(context)
        self._random = random.Random(context.ranks[context.rank])
        self._pause = threading.Event()  # never set: a way to wait for a time

    def sender(self, destination: int, *, nbytes: int, depth: int) -> BufferedSender:
        """See Communicator."""
        raw = self._inner.sender(destination, nbytes=nbytes + 8, depth=depth)
        ready = self._inner.receiver(destination, nbytes=1, depth=depth)
        thread = ThreadPoolExecutor(1, "odd-transport")

        def start(tensor: torch.Tensor) -> Later:
            return Later(thread.submit(self.deliver, raw, ready, tensor))

        return BufferedSender(start, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> BufferedReceiver:
        """See Communicator."""
        raw = self._inner.receiver(source, nbytes=nbytes + 8, depth=depth)
        ready = self._inner.sender(source, nbytes=1, depth=depth)
        return BufferedReceiver(
            lambda tensor: OnWait(lambda: self.fetch(raw, ready, tensor)), nbytes=nbytes, depth=depth
        )

    def deliver(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """What a send does, on a thread of its own."""
        raw.send([tensor])

    def fetch(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """What waiting for a receive does."""
        raw.receive([tensor])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DelayedTransport(OddTransport):
    """Reads what it sends long after the send has returned."""

    def deliver(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """See OddTransport."""
        self._pause.wait(DELAY)
        super().deliver(raw, ready, tensor)


class SlowTransport(OddTransport):
    """Sends and receives take a time that nobody knows."""

    def deliver(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """See OddTransport."""
        self._pause.wait(self._random.random() * LONGEST)
        super().deliver(raw, ready, tensor)

    def fetch(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """See OddTransport."""
        self._pause.wait(self._random.random() * LONGEST)
        super().fetch(raw, ready, tensor)


class UnbufferedTransport(OddTransport):
    """Nothing leaves before the receiver waits for it."""

    def deliver(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """See OddTransport."""
        ready.receive([_TOKEN.clone()])
        super().deliver(raw, ready, tensor)

    def fetch(self, raw: Any, ready: Any, tensor: torch.Tensor) -> None:
        """See OddTransport."""
        ready.send([_TOKEN])
        super().fetch(raw, ready, tensor)


KINDS: dict[str, type[OddTransport]] = {
    "delayed": DelayedTransport,
    "slow": SlowTransport,
    "unbuffered": UnbufferedTransport,
}
