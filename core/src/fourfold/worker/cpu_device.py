"""The CPU as a device: its memory is the host's, and nothing is asynchronous."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.model_config import Dtype
from fourfold.errors import ConfigError

DEFAULT_CACHE_BYTES: Final = 1 << 30
"""KV cache of a CPU rank when --kv-cache-memory is not given, if that is a quarter of the free memory at most."""
CACHE_SHARE: Final = 0.25


class CpuDevice:
    """See ``fourfold.worker.device.Device`` for each member."""

    name = "cpu"
    asynchronous = False

    def __init__(self, *, dtype: torch.dtype, local_workers: int = 1) -> None:
        self.dtype = dtype
        self.torch_device = torch.device("cpu")
        self._local_workers = local_workers

    @property
    def memory_bytes(self) -> int:
        """See Device."""
        return int(psutil.virtual_memory().total) // self._local_workers

    @property
    def free_bytes(self) -> int:
        """See Device."""
        return int(psutil.virtual_memory().available)

    def cache_bytes(self, cache: CacheConfig, run_largest_steps: Callable[[], int]) -> int:
        """See Device."""
        if cache.kv_cache_memory is not None:
            return cache.kv_cache_memory
        return min(DEFAULT_CACHE_BYTES, int(self.free_bytes * CACHE_SHARE / self._local_workers))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed pages that take memory only once they are touched."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)

    def staging(self, nbytes: int, *, kept: int = 0) -> SharedStaging:
        """See Device."""
        return SharedStaging(nbytes, kept)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """See Device."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Arrived:
        """See Device."""
        return Arrived(tensors)

    def broken_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See Device."""
        # On one thread: 0.08 ms for 16 rows of 49,152, where a team of threads may wait for a core that is taken.
        host = rows.numpy()
        return torch.from_numpy(~(np.isfinite(host.max(axis=-1)) & np.isfinite(host.min(axis=-1))))

    def synchronize(self) -> None:
        """See Device."""

    def trim(self) -> None:
        """See Device; the C library keeps what was freed, where it is one that can be asked for it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class SharedStaging:
    """Memory that host and device are the same of; see ``fourfold.worker.device.Staging``."""

    def __init__(self, nbytes: int, kept: int) -> None:
        self.device = torch.zeros(kept + nbytes, dtype=torch.uint8)
        self.hosts: list[npt.NDArray[np.uint8]] = [self.device.numpy()[kept:]]

    def claim(self) -> int:
        """The only one."""
        return 0

    def upload(self, place: int, nbytes: int) -> None:
        """It is there already."""


class Arrived:
    """Tensors of the host's own memory; see ``fourfold.worker.device.Fetch``."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Nothing overwrites them before they are read: on this device a step ends before the next one begins.
        self._arrays = [tensor.numpy() for tensor in tensors]

    def wait(self) -> list[npt.NDArray[Any]]:
        """They are here."""
        return self._arrays


class DtypeChoice(NamedTuple):
    """A precision and why."""

    dtype: torch.dtype
    name: str
    reason: str


def choose_cpu_dtype(wanted: Dtype, features: frozenset[str]) -> DtypeChoice:
    """The dtype on a CPU with these feature flags; ``auto`` is bfloat16 where there are instructions for it."""
    if wanted == "float16":
        raise ConfigError(
            "--dtype is float16, which a CPU computes hundreds of times slower; use bfloat16, float32 or auto"
        )
    if wanted == "float32":
        return DtypeChoice(torch.float32, "float32", "asked for")
    if wanted == "bfloat16":
        return DtypeChoice(torch.bfloat16, "bfloat16", "asked for")
    found = sorted(features & {"avx512_bf16", "amx_bf16"})
    if found:
        return DtypeChoice(torch.bfloat16, "bfloat16", f"this cpu has {' and '.join(found)}")
    return DtypeChoice(torch.float32, "float32", "this cpu has neither avx512_bf16 nor amx_bf16")


def choose_threads(cores: int, local_workers: int, omp_num_threads: str | None) -> int:
    """Threads of one rank: an even share of the cores, or what OMP_NUM_THREADS says."""
    if omp_num_threads and omp_num_threads.isdecimal() and int(omp_num_threads) > 0:
        return int(omp_num_threads)
    return max(1, cores // local_workers)


def cpu_features() -> frozenset[str]:
    """The kernel's feature flags of the first core; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
