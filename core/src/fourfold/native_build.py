"""Compiles C++ sources once per source text, flags and compiler, into the user's cache. Knows nothing of torch.

Every process that needs a library asks for it; one compiles, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.errors import Unsupported

DEADLINE: Final = 120.0
"""Seconds for a compilation, another process' included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLibrary:
    """A shared library and what it is made from."""

    name: str
    """Of its cache folder, such as ``kernels_cpu``."""
    title: str
    """How messages call it, such as ``the CPU kernels``."""
    sources: Path
    """A folder of ``*.cpp`` files and what they include."""
    flags: tuple[str, ...]
    file_name: str
    variant: str = ""
    """What else makes one build differ from another, such as the processor's features."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++; None where neither is installed."""
    return shutil.which(os.environ.get("CXX") or "g++")


def ensure_built(library: NativeLibrary) -> Path:
    """The compiled library, compiling it first where the cache has none.

    Raises Unsupported when it cannot be had, so that ``auto`` takes what needs no compiler.
    """
    command = compiler()
    if command is None:
        raise Unsupported(f"{library.title} need a C++ compiler; install g++ or set CXX")
    folder = _cache_root(library) / library.name / _fingerprint(library, command)
    target = folder / library.file_name
    deadline = time.monotonic() + DEADLINE
    try:
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder / "lock", deadline):
            if not target.exists():
                _compile(library, command, target, deadline)
    except OSError as error:
        raise Unsupported(
            f"{library.title} cannot be compiled into {str(folder)!r}: {error}; set XDG_CACHE_HOME"
        ) from error
    return target


def _cache_root(library: NativeLibrary) -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fourfold"
    except RuntimeError as error:  # no HOME, and a user id without a name, as in a container
        raise Unsupported(f"there is no folder to compile {library.title} into: {error}; set XDG_CACHE_HOME") from error


def _fingerprint(library: NativeLibrary, command: str) -> str:
    try:
        version = subprocess.run([command, "--version"], capture_output=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"the C++ compiler {command!r} does not run: {error}; repair it or set CXX") from error
    digest = hashlib.sha256(version + b"\0" + "\0".join((*library.flags, library.variant)).encode())
    for path in sorted(library.sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    pause = threading.Event()  # never set: flock has no deadline of its own
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unsupported(
                        f"another process holds {str(path)!r} for more than {DEADLINE:g} s; end it or delete the file"
                    ) from None
                pause.wait(0.02)
        yield


def _compile(library: NativeLibrary, command: str, target: Path, deadline: float) -> None:
    """Largest files first, one compiler process a core, then one link and an atomic rename."""
    sources = sorted(library.sources.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
        scratch = Path(name)
        objects = [str(scratch / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
            calls = [
                pool.submit(_run, library, [command, *library.flags, "-c", str(source), "-o", output], deadline)
                for source, output in zip(sources, objects, strict=True)
            ]
            try:
                for call in calls:
                    call.result()
            except Unsupported:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        # No -fopenmp here: OpenMP symbols stay open and bind to the runtime that torch has loaded.
        _run(library, [command, "-shared", *objects, "-o", str(scratch / library.file_name)], deadline)
        (scratch / library.file_name).replace(target)


def _run(library: NativeLibrary, arguments: list[str], deadline: float) -> None:
    try:
        subprocess.run(
            arguments, check=True, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 0.1)
        )
    except subprocess.TimeoutExpired:
        raise Unsupported(f"compiling {library.title} took more than {DEADLINE:g} s") from None
    except subprocess.CalledProcessError as error:
        raise Unsupported(f"{arguments!r} failed with code {error.returncode}: {error.stderr[-2000:]}") from None
