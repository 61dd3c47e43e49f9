"""The ways to all ranks and back, and the one thread that listens on them. Knows no process, no method and no worker.

Every call goes to every rank, in one order. Writing never waits: what finds no room is sent by the thread, which reads
all the while, so that a rank with a large reply and a caller with a large argument never wait for each other.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fourfold.errors import EngineError, ExecutorFailed
from fourfold.rpc.call import Call, Replies
from fourfold.rpc.frames import Frame, FrameReader, FrameWriter, Kind

logger = logging.getLogger(__name__)

NOTICE_SECONDS: Final = 5.0
"""How often a call that takes long says for whom it waits; also the longest sleep of the thread."""
_JOIN_TIMEOUT: Final = 10.0

Refuse = Callable[[str], EngineError]
"""The name of a method -> why it cannot be called any more."""


class NodeWay(NamedTuple):
    """The way to the ranks of another node, which hands on there what it is sent."""

    ranks: tuple[int, ...]
    send: Callable[[Frame], None]
    """Never waits, and says nothing of a node that has gone: whoever has the connection notices."""


class Channels:
    """Sends calls and settles them. Safe from every thread."""

    def __init__(
        self,
        streams: Mapping[int, socket.socket],
        *,
        nodes: Sequence[NodeWay] = (),
        describe: Callable[[int], str],
        on_broken: Callable[[BaseException], None],
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """Take over the parent's ends of the streams; all other ranks are on ``nodes``, whose answers ``take`` gets.

        ``describe`` names a rank for the log; ``on_broken`` hears, on the thread, that calls can be sent no more, and
        ``on_end`` that a rank has closed its stream, for those who have no other sentinel.
        """
        self._describe = describe
        self._on_broken = on_broken
        self._on_end = on_end
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        """Those that some rank has not answered, oldest first; also such as nobody waits for any more."""
        self._refuse: Refuse | None = None
        self._tasks: deque[Callable[[], None]] = deque()
        self._closing = False
        self._next_look = 0.0
        """When the thread looks at the deadlines again. Whoever makes it earlier wakes the thread."""
        self._ways = {rank: _Way(rank, stream) for rank, stream in streams.items()}
        self._nodes = tuple(nodes)
        self._num_ranks = len(streams) + sum(len(node.ranks) for node in nodes)
        self._wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_event, selectors.EVENT_READ, self._woken)
        for way in self._ways.values():
            self._selector.register(way.stream, selectors.EVENT_READ, partial(self._serve, way))
        self._thread = threading.Thread(target=self._run, name="rank-replies", daemon=True)
        self._thread.start()

    @property
    def on_thread(self) -> bool:
        """Whether the caller is the thread itself, which nobody may wait for there."""
        return threading.current_thread() is self._thread

    def send(self, name: str, payload: bytes, *, timeout: float, shape: Callable[[Replies], Any]) -> Call:
        """Send a call to every rank. Raises as ``stop`` was told once it was called.

        ``name`` is for messages; ``shape`` makes the future's result of the replies.
        """
        with self._lock:
            if self._refuse is not None:
                raise self._refuse(name)
            now = time.monotonic()
            call = Call(
                next(self._numbers),
                name,
                ranks=self._num_ranks,
                timeout=timeout,
                notice=NOTICE_SECONDS,
                now=now,
                shape=shape,
            )
            try:
                self._calls[call.number] = call
                sent = self._put(Frame(Kind.CALL, call.number, payload))
            except BaseException as error:  # Ctrl-C between two ranks, which could never agree on a call again
                self._refuse = _refuse_after(error)
                self._tasks.append(partial(self._on_broken, error))
                self._wake()
                raise
            if call.deadline < self._next_look:
                self._next_look, sent = call.deadline, False
            if not sent:
                self._wake()
        return call

    def stop(self, refuse: Refuse, error: Callable[[Call], EngineError]) -> bool:
        """End all calls with an error and take no more; whether a rank was in the middle of one."""
        with self._lock:
            self._refuse = refuse
            busy = bool(self._calls)
            calls = [call for call in self._calls.values() if not call.settled]
            self._calls.clear()
            for call in calls:
                call.settle_with(error(call))
        for call in calls:
            call.resolve()
        return busy

    def post(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the thread, unless it has ended."""
        with self._lock:
            self._tasks.append(task)
            self._wake()

    def phase(self, rank: int) -> str | None:
        """The name of what a rank is at; None when it waits for a call."""
        with self._lock:
            return next((call.name for call in self._calls.values() if rank in call.missing), None)

    def drain(self, rank: int) -> None:
        """Read what a rank sent before it ended; nothing to do for one of another node. On the thread only."""
        way = self._ways.get(rank)
        while way is not None and way.open and self._read(way):
            pass

    def take(self, rank: int, frame: Frame) -> None:
        """Take the answer of a rank of another node. From any thread, in the order of the rank's answers."""
        self._take(rank, [frame])

    def close(self) -> None:
        """End the thread and close the streams. Idempotent; on the thread itself it takes effect when that is free."""
        with self._lock:
            self._closing = True
            self._wake()
        if not self.on_thread:
            self._thread.join(_JOIN_TIMEOUT)

    def _put(self, frame: Frame) -> bool:
        """Send a frame to every rank as far as there is room; whether that was all of it."""
        sent = True
        for node in self._nodes:  # first, since theirs is the longer way
            node.send(frame)
        for way in self._ways.values():
            sent &= way.writer.put(frame)
        return sent

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                wait = self._next_look - time.monotonic()
                if wait <= 0:
                    self._look()
                    continue
                for key, events in self._selector.select(wait):
                    key.data(events)
        except Exception as error:
            logger.exception("the thread that listens to the ranks failed")
            self._on_broken(error)
        with self._lock:
            self._selector.close()
            os.close(self._wake_event)
            self._wake_event = -1
            for way in self._ways.values():
                way.stream.close()

    def _wake(self) -> None:
        """Under the lock, so that the event is there."""
        if self._wake_event >= 0:
            os.eventfd_write(self._wake_event, 1)

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake_event)
        while self._tasks:
            self._tasks.popleft()()
        self._watch_room()

    def _watch_room(self) -> None:
        """Listen for room where something waits to be sent."""
        with self._lock:
            for way in self._ways.values():
                if way.open:
                    events = selectors.EVENT_READ | (0 if way.writer.flush() else selectors.EVENT_WRITE)
                    self._selector.modify(way.stream, events, partial(self._serve, way))

    def _serve(self, way: _Way, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read(way)
        if events & selectors.EVENT_WRITE and way.open:
            with self._lock:
                sent = way.writer.flush()
            if sent:
                self._selector.modify(way.stream, selectors.EVENT_READ, partial(self._serve, way))

    def _read(self, way: _Way) -> bool:
        """Take what one read brings; whether there may be more."""
        if not way.open:  # its end was read since ``select`` told of it
            return False
        try:
            frames = way.reader.read()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # the rank has ended, which its sentinel tells
            way.open = False
            self._selector.unregister(way.stream)
            if self._on_end is not None:
                self._on_end(way.rank)
            return False
        if frames:
            self._take(way.rank, frames)
        return True

    def _take(self, rank: int, frames: list[Frame]) -> None:
        now = time.monotonic()
        over = []
        with self._lock:
            for frame in frames:
                call = self._calls.get(frame.number)
                if call is None:  # after ``stop``
                    continue
                was_settled = call.settled
                call.take(rank, frame, now)
                if not call.missing:
                    del self._calls[call.number]
                if not call.settled:
                    if call.wake_time < self._next_look:
                        self._next_look = call.wake_time
                        self._wake()
                elif not was_settled:
                    over.append(call)
        for call in over:
            call.resolve()

    def _look(self) -> None:
        """End calls whose time is up, and speak of those that take long."""
        now = time.monotonic()
        over: list[Call] = []
        slow: list[tuple[str, list[int], float, float]] = []
        with self._lock:
            self._next_look = now + NOTICE_SECONDS
            for call in self._calls.values():
                if call.settled:
                    continue
                call.settle_overdue(now)
                if call.settled:
                    over.append(call)
                    continue
                if call.notice_due(now):
                    slow.append((call.name, sorted(call.missing), now - call.started, call.deadline - call.started))
                self._next_look = min(self._next_look, call.wake_time)
        for call in over:
            call.resolve()
        for name, missing, elapsed, timeout in slow:
            ranks = ", ".join(map(self._describe, missing))
            logger.info("%s: waiting for %s, %.0f s of %.0f s", name, ranks, elapsed, timeout)


def _refuse_after(error: BaseException) -> Refuse:
    return lambda name: ExecutorFailed(f"{name!r} was called, but an earlier call was torn by {type(error).__name__}")


class _Way:
    """The stream to one rank and back."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.rank = rank
        self.stream = stream
        self.open = True
        """Whether the rank may still say something."""
        self.reader = FrameReader(stream)
        self.writer = FrameWriter(stream)
