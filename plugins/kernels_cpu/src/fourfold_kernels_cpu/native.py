"""The compiled library, loaded once beside torch's own OpenMP runtime, and the one way to call its kernels.

A call is a kernel's name, its packed 8-byte slots and the tensors behind them. While a program is being recorded,
calls are noted there instead of being run, and memory for results is the program's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from fourfold.errors import EngineError, Unsupported
from fourfold_kernels_cpu.build import ensure_built
from fourfold_kernels_cpu.cpu_support import unsupported_reason

KERNELS: Final = (
    "add_rms_norm",
    "argmax",
    "attention",
    "call",
    "embedding",
    "gelu_mul",
    "gelu_tanh_mul",
    "gumbel_argmax",
    "linear",
    "logsumexp",
    "pack",
    "rms_norm",
    "rope_and_cache",
    "scale",
    "silu_mul",
    "softcap",
)
ABI_VERSION: Final = 1


class Recorder(Protocol):
    """Takes note of calls while a program is captured."""

    def record(self, body: int, slots: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        """Note one call; ``tensors`` must stay alive as long as the program."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that the program owns."""


class Native:
    """The kernels of one loaded library."""

    def __init__(self, path: Path) -> None:
        _share_openmp_runtime()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unsupported(f"the compiled CPU kernels cannot be loaded: {error}; delete {str(path)!r}") from error
        self._library.ff_abi_version.restype = ctypes.c_int64
        version = self._library.ff_abi_version()
        if version != ABI_VERSION:
            raise EngineError(f"{str(path)!r} has kernel ABI {version}, this package needs {ABI_VERSION}; delete it")
        self._functions: dict[str, Callable[[bytes], None]] = {}
        self._bodies: dict[str, int] = {}
        for name in KERNELS:
            function = getattr(self._library, f"ff_{name}")
            function.argtypes, function.restype = [ctypes.c_char_p], None
            self._functions[name] = function
            body = ctypes.cast(getattr(self._library, f"ff_{name}_body"), ctypes.c_void_p)
            self._bodies[name] = body.value or 0
        self._replay = self._library.ff_replay
        self._replay.argtypes, self._replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self.recorder: Recorder | None = None

    def call(self, kernel: str, slots: bytes, *tensors: torch.Tensor | None) -> None:
        """Run a kernel or, while a program is captured, note it there instead."""
        if self.recorder is None:
            # Asking torch also hands its setting to OpenMP on a Python thread that has not computed yet.
            torch.get_num_threads()
            self._functions[kernel](slots)
        else:
            self.recorder.record(self._bodies[kernel], slots, tensors)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""
        if self.recorder is not None:
            return self.recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def replay(self, records: int, count: int) -> None:
        """Run ``count`` recorded calls, an array of (body, slots) addresses, in one team of threads."""
        torch.get_num_threads()
        self._replay(records, count)


@functools.cache
def load() -> Native:
    """The library of this machine, compiled where needed."""
    reason = unsupported_reason()
    if reason is not None:
        raise Unsupported(f"the CPU kernels cannot run here: {reason}")
    return Native(ensure_built())


def _share_openmp_runtime() -> None:
    """Make the symbols of torch's libgomp visible, so that there is one thread pool; else the system's."""
    path = "libgomp.so.1"
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        mapped = line.split(maxsplit=5)[-1]
        if "libgomp" in mapped.rpartition("/")[2]:
            path = mapped
            break
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Unsupported(f"no OpenMP runtime {path!r} for the CPU kernels: {error}") from error
