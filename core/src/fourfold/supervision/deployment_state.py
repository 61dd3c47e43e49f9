"""What operators have wished of a running deployment, in its run directory: for processes that start after the wish.

API servers carry a wish out on the engines that are up; whoever starts later reads it here. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fourfold.errors import RequestError

_FILE = "wishes.json"
_LOCK = "wishes.lock"


class WishedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests may name."""

    name: str
    """As clients call it."""
    folder: str
    unique: str
    """As engines call it: another one each time that it is loaded, so that nothing cached outlives it."""


class DeploymentState(msgspec.Struct, frozen=True, kw_only=True):
    """How engines are to be."""

    weights: str = ""
    """The model whose weights have taken the place of the first ones; empty: none has."""
    sleep_level: int = 0
    """Of the last sleep."""
    asleep: tuple[str, ...] = ()
    """Which of ``fourfold.sleep_tags.TAGS`` are."""
    paused: bool = False
    """Whether all wait, awake or not, until an operator lets them go on."""
    adapters: tuple[WishedAdapter, ...] = ()
    """In the order in which they were loaded."""


class StateChange:
    """The right to change the state, which one process has at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.state = read_state(folder)

    def write(self, state: DeploymentState) -> None:
        """Let this be the state; readers see the old one or this one."""
        self.state = state
        write_state(self._folder, state)


def read_state(folder: Path) -> DeploymentState:
    """The state as it is; as at the start where nobody has wished anything."""
    try:
        content = (folder / _FILE).read_bytes()
    except FileNotFoundError:
        return DeploymentState()
    return msgspec.json.decode(content, type=DeploymentState)


class WatchedState:
    """The state for those who look at it often: it is read again only when it was written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._state = DeploymentState()

    def read(self) -> DeploymentState:
        """The state as it is; a few microseconds."""
        try:
            written = (self._folder / _FILE).stat()
        except FileNotFoundError:
            return self._state
        seen = written.st_mtime_ns, written.st_ino
        if self._seen != seen:
            self._state, self._seen = read_state(self._folder), seen
        return self._state

    def changed_within(self, seconds: float) -> bool:
        """Whether somebody has ended a change that lately."""
        try:
            ended = (self._folder / _LOCK).stat().st_mtime
        except FileNotFoundError:
            return False
        return time.time() - ended < seconds


def write_state(folder: Path, state: DeploymentState) -> None:
    """Put a state in place of the one that there is; for the process that makes the folder, and for ``StateChange``."""
    temporary = folder / f".{_FILE}.{secrets.token_hex(4)}"
    temporary.write_bytes(msgspec.json.encode(state))
    temporary.replace(folder / _FILE)


@contextlib.contextmanager
def changing_state(folder: Path) -> Iterator[StateChange]:
    """Raises RequestError with status 409 while somebody else, in this process or another, is at it."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError("another operation is under way; try again when it is done", status=409) from error
        yield StateChange(folder)
    finally:
        os.utime(lock)
        os.close(lock)  # which unlocks it
