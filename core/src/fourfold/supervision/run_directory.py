"""One private folder per deployment: sockets, the config, and a state file per process that `fourfold ps` reads.

A locked folder belongs to a running deployment; the kernel drops the lock with its owner, whatever killed it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from fourfold.errors import ConfigError

CONFIG_FILE = "config.json"
"""The engines' config in a run directory."""

_LONGEST_SOCKET_NAME = "/xxxxxxxx/engine-1000-100000"
_MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path, from the kernel's sockaddr_un."""
_CREATE_ATTEMPTS = 10


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a deployment, as `/topology` and `fourfold ps` show it."""

    role: str
    """api_server, engine_core, worker or coordinator."""
    label: str
    """Its place, such as ``DP0.PP1.TP3``; empty where there is one of its role."""
    pid: int
    state: str
    """starting, running, draining or restarting."""
    host: str
    start_time: int
    """Clock ticks from boot to its start; with the pid it names a process for good."""
    detail: str = ""
    """What else an operator wants to know, such as the URL."""
    node: str = ""
    """The node that it is on, where its engine is on several."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A run directory as another process finds it."""

    name: str
    model: str
    """As clients call it; empty while the deployment starts."""
    processes: list[ProcessState]


class RunDirectory:
    """A deployment's own folder, removed by ``close`` or by the next start."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, root: Path | None = None) -> Self:
        """Make and lock a new folder, after sweeping those whose owner has gone. Raises ConfigError."""
        root = root or root_directory()
        _make_private(root)
        _sweep(root)
        for _ in range(_CREATE_ATTEMPTS):
            path = root / secrets.token_hex(4)
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise _cannot_make(path, error) from error
            lock = _lock(path)
            if lock is not None:
                return cls(path, lock)
        raise ConfigError(f"cannot make a run directory in {root}: other starts remove it again and again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write_file(self, name: str, content: bytes) -> Path:
        """Write a file that readers see whole or not at all."""
        path = self.path / name
        temporary = path.with_name(f".{name}.new")
        temporary.write_bytes(content)
        temporary.replace(path)
        return path

    def write_state(self, state: ProcessState) -> None:
        """Show a process to `fourfold ps`; a later state of the same role and label replaces it."""
        self.write_file(_state_file(state.role, state.label), msgspec.json.encode(state))

    def remove_state(self, role: str, label: str) -> None:
        """Show a process no longer."""
        (self.path / _state_file(role, label)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def root_directory() -> Path:
    """Where this user's run directories are: below $XDG_RUNTIME_DIR, or in /tmp where that is unset or too long."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        root = Path(runtime) / "fourfold"
        if len(os.fsencode(f"{root}{_LONGEST_SOCKET_NAME}")) <= _MAX_SOCKET_PATH:
            return root
    # The name can be guessed, so _make_private checks whose it is.
    return Path("/tmp") / f"fourfold-{os.getuid()}"  # noqa: S108


def deployments(root: Path | None = None) -> list[Deployment]:
    """Every running deployment of this user with its running processes."""
    root = root or root_directory()
    found = []
    for path in _folders(root):
        lock = _try_lock(path)
        if lock is None:  # its owner runs
            found.append(Deployment(name=path.name, model=_model(path), processes=running_processes(path)))
        else:
            os.close(lock)
    return found


def running_processes(path: Path) -> list[ProcessState]:
    """What a run directory says of processes that still run, by role and label."""
    return sorted(filter(is_running, _states(path)), key=lambda state: (state.role, state.label))


def process_state(role: str, label: str, state: str, *, pid: int | None = None, detail: str = "") -> ProcessState:
    """The state of a process of this host, by default of this one. Raises ProcessLookupError for one that is gone."""
    pid = os.getpid() if pid is None else pid
    return ProcessState(
        role=role,
        label=label,
        pid=pid,
        state=state,
        host=socket.gethostname(),
        start_time=_start_time(pid),
        detail=detail,
    )


def is_running(state: ProcessState) -> bool:
    """Whether the very process that ``state`` describes still runs; true for one of another host."""
    if state.host != socket.gethostname():
        return True
    try:
        return _start_time(state.pid) == state.start_time
    except ProcessLookupError:
        return False


def process_age(state: ProcessState) -> float | None:
    """Seconds since its start; None for a process of another host."""
    if state.host != socket.gethostname():
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - state.start_time / os.sysconf("SC_CLK_TCK"))


def _model(path: Path) -> str:
    try:
        model = msgspec.json.decode((path / CONFIG_FILE).read_bytes())["model"]
        return str((model["served_model_name"] or [model["model"]])[0])
    except (OSError, msgspec.MsgspecError, LookupError, TypeError):  # not written yet, or of another version
        return ""


def _start_time(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The second field is the name in brackets and may hold anything; the start time is field 22.
    return int(fields.rpartition(")")[2].split()[19])


def _state_file(role: str, label: str) -> str:
    return f"{role}-{label or '0'}.state"


def _states(path: Path) -> Iterator[ProcessState]:
    for file in path.glob("*.state"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # removed meanwhile, or of another version
            yield msgspec.json.decode(file.read_bytes(), type=ProcessState)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise _cannot_make(root, error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{root} is not a directory of this user's; remove it, or set XDG_RUNTIME_DIR to one")
    if stat.S_IMODE(status.st_mode) & 0o077:
        root.chmod(0o700)


def _sweep(root: Path) -> None:
    """Remove folders that nobody holds."""
    for path in _folders(root):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _cannot_make(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot make the run directory {path}: {error.strerror}; set XDG_RUNTIME_DIR")


def _lock(path: Path) -> int | None:
    """A descriptor that holds ``path``; None if another process does, or has removed it in between."""
    lock = _try_lock(path)
    if lock is None:
        return None
    try:
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except FileNotFoundError:
        pass
    os.close(lock)
    return None


def _try_lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
