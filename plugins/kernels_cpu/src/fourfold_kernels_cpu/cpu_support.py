"""Whether this machine can compile and run the kernels. Knows nothing of torch."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from fourfold.native_build import compiler

REQUIRED_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")


@functools.cache
def missing_flags() -> tuple[str, ...]:
    """The required CPU features that this processor lacks, as /proc/cpuinfo spells them."""
    if platform.machine() != "x86_64":
        return REQUIRED_FLAGS
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return REQUIRED_FLAGS
    present: set[str] = set()
    for line in lines:
        if line.startswith("flags"):
            present = set(line.partition(":")[2].split())
            break
    return tuple(flag for flag in REQUIRED_FLAGS if flag not in present)


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, with what to do; None where they can."""
    missing = missing_flags()
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    if compiler() is None:
        return "no C++ compiler: install g++ or set CXX"
    return None
