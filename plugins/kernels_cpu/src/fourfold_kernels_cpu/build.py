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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold.errors import EngineError, Unsupported

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
    """The compiled library of these sources, compiling it first where the cache has none."""
    command = compiler()
    if command is None:
        raise Unsupported("the CPU kernels need a C++ compiler; install g++ or set CXX")
    folder = _cache_root() / _fingerprint(command)
    library = folder / LIBRARY
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + DEADLINE
    with _locked(folder / "lock", deadline):
        if not library.exists():
            _compile(command, library, deadline)
    return library


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fourfold" / "kernels_cpu"


def _fingerprint(command: str) -> str:
    version = subprocess.run([command, "--version"], capture_output=True, check=False, timeout=30).stdout
    digest = hashlib.sha256(version + b"\0" + "\0".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"another process holds {str(path)!r} for more than {DEADLINE:g} s; end it or delete the file"
                    ) from None
                time.sleep(0.02)
        yield


def _compile(command: str, library: Path, deadline: float) -> None:
    """Largest files first, one compiler process a core, then one link and an atomic rename."""
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        scratch = Path(name)
        objects = [scratch / f"{source.stem}.o" for source in sources]
        pending = list(zip(sources, objects, strict=True))
        running: list[subprocess.Popen[bytes]] = []
        try:
            while pending or running:
                while pending and len(running) < max(2, len(os.sched_getaffinity(0))):
                    source, target = pending.pop(0)
                    arguments = [command, *FLAGS, "-c", str(source), "-o", str(target)]
                    running.append(subprocess.Popen(arguments, stderr=subprocess.PIPE))
                running = [child for child in running if not _finished(child, deadline)]
                time.sleep(0.005)
        finally:
            for child in running:
                child.kill()
                child.wait()
        linked = scratch / LIBRARY
        # No -fopenmp here: the OpenMP symbols stay open and bind to the runtime that torch has loaded.
        _check(subprocess.Popen([command, "-shared", *map(str, objects), "-o", str(linked)], stderr=subprocess.PIPE))
        linked.replace(library)


def _finished(child: subprocess.Popen[bytes], deadline: float) -> bool:
    if child.poll() is None:
        if time.monotonic() > deadline:
            raise EngineError(f"compiling the CPU kernels took more than {DEADLINE:g} s")
        return False
    _check(child)
    return True


def _check(child: subprocess.Popen[bytes]) -> None:
    _, errors = child.communicate(timeout=DEADLINE)
    if child.returncode:
        tail = errors.decode(errors="replace")[-2000:]
        raise EngineError(f"{child.args!r} failed with code {child.returncode}: {tail}")


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_built()}\n")
