"""The compiled library: what it is made from, and its functions with their C types. Knows nothing of torch.

``python -m fourfold_comm_cpu.native`` compiles ahead of time and prints the library's path.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fourfold.config.resolution import cpu_features
from fourfold.errors import Unsupported
from fourfold.native_build import NativeLibrary, ensure_built

ABI_VERSION: Final = 2
FLAGS: Final = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
_POINTER, _NUMBER, _UNSIGNED = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
_FUNCTIONS: Final[Mapping[str, tuple[type, ...]]] = {
    "ff_all_reduce": (_POINTER, _POINTER, _NUMBER, _NUMBER),
    "ff_start_all_reduce": (_POINTER, _POINTER, _NUMBER, _NUMBER),
    "ff_finish_all_reduce": (_POINTER, _POINTER, _NUMBER, _NUMBER),
    "ff_gather": (_POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER),
    "ff_all_gather": (_POINTER, _POINTER, _POINTER, _POINTER),
    "ff_reduce_scatter": (_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER),
    "ff_broadcast": (_POINTER, _POINTER, _NUMBER, _NUMBER),
    "ff_all_to_all": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    "ff_barrier": (_POINTER,),
    "ff_push": (_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER),
    "ff_pull": (_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER),
    "ff_pipe_send": (_POINTER, _POINTER, _POINTER, _NUMBER),
    "ff_pipe_receive": (_POINTER, _POINTER, _POINTER, _NUMBER),
    "ff_wait_for_change": (_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER),
}


def library() -> NativeLibrary:
    """What is compiled; ``-march=native`` makes it one of this processor."""
    return NativeLibrary(
        name="comm_cpu",
        title="the shared-memory collectives",
        sources=Path(__file__).parent / "csrc",
        flags=FLAGS,
        file_name="libfourfold_comm_cpu.so",
        variant=" ".join(sorted(cpu_features())),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library of this machine, compiled where needed; raises Unsupported where it cannot be had."""
    path = ensure_built(library())
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unsupported(f"{str(path)!r} cannot be loaded: {error}; delete it") from error
    loaded.ff_abi_version.restype = ctypes.c_int64
    if loaded.ff_abi_version() != ABI_VERSION:
        raise Unsupported(f"{str(path)!r} has another ABI than this package; delete it")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int64
    return loaded


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_built(library())}\n")
