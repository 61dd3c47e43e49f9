"""Folders that are made once: under a lock, in a temporary place, and renamed when whole. Knows not what is in them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fourfold.errors import CheckpointError

_LOCK_TIMEOUT = 600.0
_HINT = "set XDG_CACHE_HOME to a folder that can be written"


def default_cache_folder() -> str:
    """``$XDG_CACHE_HOME/fourfold/models``, or the same under ``~/.cache``. Raises CheckpointError without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return str(Path(base).expanduser() / "fourfold" / "models")
    except RuntimeError as error:  # no HOME, and a user id without a name, as in a container
        raise CheckpointError(f"there is no folder for converted models: {error}; {_HINT}") from error


def converted_folder(cache: Path, source: Path, version: int) -> Path:
    """Where the conversion of ``source`` belongs: another path, size, time of change or version is another folder."""
    source = source.resolve()
    status = source.stat()
    identity = f"{source}\0{status.st_size}\0{status.st_mtime_ns}\0{version}"
    return cache / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def make_once(folder: Path, fill: Callable[[Path], None], *, timeout: float = _LOCK_TIMEOUT) -> Path:
    """``folder``, filled by ``fill`` unless it is there already. Of several processes one fills, the others wait.

    ``fill`` works in a temporary folder that is renamed at the end, so a process that is killed leaves nothing that is
    ever trusted. Raises CheckpointError when the cache cannot be written or another process holds the lock too long.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), timeout):
            if folder.is_dir():
                return folder
            _remove_leftovers(folder)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
            try:
                fill(temporary)
                temporary.chmod(0o755)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space, or set XDG_CACHE_HOME to another disk" if full else _HINT
        raise CheckpointError(f"the converted model cannot be kept in {folder}: {error}; {hint}") from error
    return folder


def _remove_leftovers(folder: Path) -> None:
    """What killed processes left behind; nobody else is at work while the lock is held."""
    for path in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        _acquire(file.fileno(), path, timeout)
        yield  # closing the file releases the lock, as does the end of the process


def _acquire(descriptor: int, path: Path, timeout: float) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    acquired = threading.Event()

    def wait() -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        acquired.set()

    # flock has no timeout of its own. A thread that waits past the deadline holds nothing: its descriptor is closed.
    threading.Thread(target=wait, name="conversion-lock", daemon=True).start()
    if not acquired.wait(timeout):
        raise CheckpointError(
            f"another process has been converting the same model for {timeout:g} s and holds {path}; end it or wait"
        )
