"""Rounds in which every rank gives a note and gets all of them, in a store that they share. Knows no calls.

A rank may end a round before all have given, so that nobody waits for those that never will.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 4 << 20
"""A value of a torch TCPStore holds 8 MiB at most."""
_COUNT_BYTES: Final = 4
_SHORTEST: Final = 0.05
"""Seconds that a wait in the store takes at least, also where the deadline has passed."""


class Meeting:
    """One rank's part. ``give`` and ``take`` are for one thread each; rounds count from 0, the same on all ranks."""

    def __init__(self, store: Any, *, rank: int, world_size: int, hosts_store: bool) -> None:
        """``store`` is a torch.distributed Store that no other meeting uses."""
        self._taking = store
        self._giving = store.clone()  # a connection of its own, which a wait in the other one does not block
        self._lock = threading.Lock()
        self._rank = rank
        self._world_size = world_size
        self._hosts_store = hosts_store
        self._parted = False
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Ctrl-C is not heard in the store, but by a caller that waits for this thread.
        threading.Thread(target=self._serve_waits, name="meeting", daemon=True).start()

    def give(self, number: int, note: bytes, *, ends: bool = False) -> None:
        """Put down this rank's note of a round; ``ends``: nobody need wait for the others."""
        pieces = [note[start : start + _PIECE_BYTES] for start in range(0, len(note), _PIECE_BYTES)] or [b""]
        with self._lock:
            for index, piece in enumerate(pieces[1:], 1):
                self._giving.set(_piece_key(number, self._rank, index), piece)
            self._giving.set(_key(number, self._rank), len(pieces).to_bytes(_COUNT_BYTES, "little") + pieces[0])
            everyone = self._giving.add(f"{number}/given", 1) == self._world_size
            if everyone or ends:
                self._giving.set(f"{number}/over", b"over")

    def take(self, number: int, timeout: float) -> dict[int, bytes]:
        """rank -> note when the round is over, or of those who have given within ``timeout`` seconds.

        Raises RuntimeError when the store has gone, as it does with the process that hosts it.
        """
        self._wait(f"{number}/over", timeout)
        keys = [_key(number, rank) for rank in range(self._world_size)]
        given = [rank for rank, key in enumerate(keys) if self._taking.check([key])]
        notes = {rank: self._note(number, rank) for rank in given}
        if len(notes) == self._world_size:
            self._forget(number - 1)
        return notes

    def abandon(self, number: int, reason: str) -> None:
        """Let nobody wait any more, since a rank is lost; from any thread.

        ``number`` is the last round that this rank took part in; others may be in the next one already.
        """
        with self._lock:
            self._giving.set("lost", reason)
            for one in (number, number + 1):
                self._giving.set(f"{one}/over", b"over")

    def reason_to_give_up(self) -> str:
        """What another rank has said of a loss that it alone may have seen; empty where there is none."""
        with self._lock:
            return bytes(self._giving.get("lost")).decode() if self._giving.check(["lost"]) else ""

    def has_parted(self, rank: int) -> bool:
        """Whether a rank has said goodbye."""
        with self._lock:
            return bool(self._giving.check([f"parted/{rank}"]))

    def part(self, timeout: float) -> None:
        """Say goodbye. The host of the store waits for all, ``timeout`` seconds at most: they may have more to read."""
        if self._parted:
            return
        self._parted = True
        try:
            with self._lock:
                self._giving.set(f"parted/{self._rank}", b"")
                if self._giving.add("parted", 1) == self._world_size:
                    self._giving.set("all parted", b"over")
            if self._hosts_store:
                self._wait("all parted", timeout)
        except RuntimeError:  # the host has gone already, which is what this is about
            return
        finally:
            self._waits.put(None)

    def _wait(self, key: str, timeout: float) -> None:
        """Return when ``key`` is there or ``timeout`` seconds have passed."""
        done: Future[None] = Future()

        def wait() -> None:
            try:
                self._taking.wait([key], timedelta(seconds=max(timeout, _SHORTEST)))
            except RuntimeError as error:  # too late; or the store has gone, as the next look at it will tell
                logger.debug("%s did not come: %s", key, error)
            finally:
                done.set_result(None)

        self._waits.put(wait)
        done.result()

    def _serve_waits(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()

    def _note(self, number: int, rank: int) -> bytes:
        first = bytes(self._taking.get(_key(number, rank)))
        count = int.from_bytes(first[:_COUNT_BYTES], "little")
        rest = [bytes(self._taking.get(_piece_key(number, rank, index))) for index in range(1, count)]
        return b"".join([first[_COUNT_BYTES:], *rest])

    def _forget(self, number: int) -> None:
        """Clear away a round that everyone has taken: whoever has given in the next one has."""
        if number < 0:
            return
        with self._lock:
            index = 1
            while self._giving.delete_key(_piece_key(number, self._rank, index)):
                index += 1
            self._giving.delete_key(_key(number, self._rank))
            if self._rank == 0:
                self._giving.delete_key(f"{number}/given")
                self._giving.delete_key(f"{number}/over")


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _piece_key(number: int, rank: int, index: int) -> str:
    return f"{number}/{rank}/{index}"
