"""Compiles the C++ sources once per source text, flags and compiler, into the user's cache. Knows nothing of torch.

``python -m fourfold_kernels_cpu.build`` compiles ahead of time and prints the library's path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold.errors import Unsupported
from fourfold_kernels_cpu.cpu_support import compiler

SOURCES: Final = Path(__file__).parent / "csrc"
FLAGS: Final = (
    "-O2",
    "-std=c++17",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
)
DEADLINE: Final = 120.0
"""Seconds for the compilation, another process' included."""
LIBRARY: Final = "libfourfold_kernels_cpu.so"


def ensure_built() -> Path:
    """The compiled library of these sources, compiling it first where the cache has none.

    Raises Unsupported when it cannot be had, so that ``auto`` takes the torch twins.
    """
    command = compiler()
    if command is None:
        raise Unsupported("the CPU kernels need a C++ compiler; install g++ or set CXX")
    folder = _cache_root() / _fingerprint(command)
    library = folder / LIBRARY
    deadline = time.monotonic() + DEADLINE
    try:
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder / "lock", deadline):
            if not library.exists():
                _compile(command, library, deadline)
    except OSError as error:
        raise Unsupported(
            f"the CPU kernels cannot be compiled into {str(folder)!r}: {error}; set XDG_CACHE_HOME"
        ) from error
    return library


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fourfold" / "kernels_cpu"
    except RuntimeError as error:  # no HOME, and a user id without a name, as in a container
        raise Unsupported(f"there is no folder for the compiled CPU kernels: {error}; set XDG_CACHE_HOME") from error


def _fingerprint(command: str) -> str:
    try:
        version = subprocess.run([command, "--version"], capture_output=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"the C++ compiler {command!r} does not run: {error}; repair it or set CXX") from error
    digest = hashlib.sha256(version + b"\0" + "\0".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
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


def _compile(command: str, library: Path, deadline: float) -> None:
    """Largest files first, one compiler process a core, then one link and an atomic rename."""
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        scratch = Path(name)
        objects = [str(scratch / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
            calls = [
                pool.submit(_run, [command, *FLAGS, "-c", str(source), "-o", target], deadline)
                for source, target in zip(sources, objects, strict=True)
            ]
            try:
                for call in calls:
                    call.result()
            except Unsupported:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        # No -fopenmp here: the OpenMP symbols stay open and bind to the runtime that torch has loaded.
        _run([command, "-shared", *objects, "-o", str(scratch / LIBRARY)], deadline)
        (scratch / LIBRARY).replace(library)


def _run(arguments: list[str], deadline: float) -> None:
    try:
        subprocess.run(
            arguments, check=True, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 0.1)
        )
    except subprocess.TimeoutExpired:
        raise Unsupported(f"compiling the CPU kernels took more than {DEADLINE:g} s") from None
    except subprocess.CalledProcessError as error:
        raise Unsupported(f"{arguments!r} failed with code {error.returncode}: {error.stderr[-2000:]}") from None


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_built()}\n")
