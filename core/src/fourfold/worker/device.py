"""The one seam for device, dtype and platform: what differs between a CPU and an accelerator is decided here.

Models, samplers and runners ask this object and never the hardware.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype
from fourfold.errors import ConfigError

DEFAULT_CACHE_BYTES: Final = 1 << 30
"""KV cache of a CPU rank when --kv-cache-memory is not given, if that is a quarter of the free memory at most."""
CACHE_SHARE: Final = 0.25

log = logging.getLogger(__name__)


class Mirror(Protocol):
    """An array that the host fills and the device reads; both stay at their addresses."""

    @property
    def host(self) -> npt.NDArray[Any]:
        """What the host writes."""

    def upload(self, rows: int) -> torch.Tensor:
        """The first ``rows`` rows as the host has them now, on the device."""


class Device(Protocol):
    """Where a rank computes."""

    @property
    def name(self) -> str:
        """For logs and replies, such as ``cpu``."""

    @property
    def torch_device(self) -> torch.device:
        """For tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and activations."""

    @property
    def memory_bytes(self) -> int:
        """Its memory, free or not, that this rank has at most."""

    def cache_bytes(self, cache: CacheConfig) -> int:
        """Memory that the KV cache of this rank may take; asked after the weights are loaded."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A large zeroed tensor."""

    def mirror(self, shape: Sequence[int], dtype: torch.dtype) -> Mirror:
        """A zeroed array that the host fills and the device reads."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy or a view of ``array`` on the device."""

    def finite_rows(self, rows: torch.Tensor) -> npt.NDArray[np.bool_]:
        """[R]: whether every entry of a row of fp32 [R, V] is finite."""

    def synchronize(self) -> None:
        """Return when everything that was started is done."""


def open_device(config: EngineConfig, *, local_rank: int, local_workers: int) -> Device:
    """The device of rank ``local_rank`` of ``local_workers`` on this host, ready to compute.

    Raises ConfigError for a dtype that it cannot compute in.
    """
    choice = choose_cpu_dtype(config.model.dtype, cpu_features())
    threads = choose_threads(len(os.sched_getaffinity(0)), local_workers, os.environ.get("OMP_NUM_THREADS"))
    torch.set_num_threads(threads)
    log.info("local rank %d: cpu, %s: %s; %d thread(s)", local_rank, choice.name, choice.reason, threads)
    return CpuDevice(dtype=choice.dtype, local_workers=local_workers)


class CpuDevice:
    """The host itself: the device's memory is the host's, and nothing is asynchronous."""

    name = "cpu"

    def __init__(self, *, dtype: torch.dtype, local_workers: int = 1) -> None:
        self.dtype = dtype
        self.torch_device = torch.device("cpu")
        self._local_workers = local_workers

    @property
    def memory_bytes(self) -> int:
        """See Device."""
        return int(psutil.virtual_memory().total) // self._local_workers

    def cache_bytes(self, cache: CacheConfig) -> int:
        """See Device."""
        if cache.kv_cache_memory is not None:
            return cache.kv_cache_memory
        free = psutil.virtual_memory().available
        return min(DEFAULT_CACHE_BYTES, int(free * CACHE_SHARE / self._local_workers))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed pages that take memory only once they are touched."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)

    def mirror(self, shape: Sequence[int], dtype: torch.dtype) -> Mirror:
        """See Device."""
        return _SharedMirror(torch.zeros(*shape, dtype=dtype))

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """See Device."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def finite_rows(self, rows: torch.Tensor) -> npt.NDArray[np.bool_]:
        """See Device."""
        # On one thread: 0.08 ms for 16 rows of 49,152, where a team of threads may wait for a core that is taken.
        host = rows.numpy()
        finite: npt.NDArray[np.bool_] = np.isfinite(host.max(axis=-1)) & np.isfinite(host.min(axis=-1))
        return finite

    def synchronize(self) -> None:
        """See Device."""


class _SharedMirror:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.host: npt.NDArray[Any] = tensor.numpy()

    def upload(self, rows: int) -> torch.Tensor:
        return self._tensor[:rows]


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
