"""What the kernels are compiled from and how; core compiles them once into the user's cache.

``python -m fourfold_kernels_cpu.build`` compiles ahead of time and prints the library's path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from fourfold import native_build

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
LIBRARY: Final = "libfourfold_kernels_cpu.so"


def ensure_built() -> Path:
    """The compiled library of these sources; raises Unsupported when it cannot be had."""
    return native_build.ensure_built(
        native_build.NativeLibrary(
            name="kernels_cpu", title="the CPU kernels", sources=SOURCES, flags=FLAGS, file_name=LIBRARY
        )
    )


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_built()}\n")
