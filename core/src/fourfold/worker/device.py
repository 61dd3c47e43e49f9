"""The one seam for device, dtype and platform: what differs between a CPU and an accelerator is decided here.

Models, samplers and runners ask a Device and never the hardware; each kind is one file beside this one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.worker.cpu_device import CpuDevice, choose_cpu_dtype, choose_threads, cpu_features

log = logging.getLogger(__name__)


class Staging(Protocol):
    """Memory that the host fills anew for every step and the device reads; the device's part stays at its address."""

    @property
    def device(self) -> torch.Tensor:
        """uint8 [kept + nbytes]: first what is the device's own, zeros at the start, then what uploads bring."""

    @property
    def hosts(self) -> Sequence[npt.NDArray[np.uint8]]:
        """[nbytes] each, filled in turn."""

    def claim(self) -> int:
        """The index of the one to fill next; waits while the device still reads it."""

    def upload(self, place: int, nbytes: int) -> None:
        """Bring the first ``nbytes`` of ``hosts[place]`` to the device, after what was started before."""


class Fetch(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[npt.NDArray[Any]]:
        """Their values as they were when the fetch began; returns when they are here. From any thread, repeatedly."""


class Device(Protocol):
    """Where a rank computes."""

    @property
    def name(self) -> str:
        """For logs and replies, such as ``cpu``."""

    @property
    def asynchronous(self) -> bool:
        """Whether operations are only started when they are called, so that the host must not look at values."""

    @property
    def torch_device(self) -> torch.device:
        """For tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and activations."""

    @property
    def memory_bytes(self) -> int:
        """Its memory, free or not, that this rank has at most."""

    @property
    def free_bytes(self) -> int:
        """Its memory that nobody has."""

    def cache_bytes(self, cache: CacheConfig, run_largest_steps: Callable[[], int]) -> int:
        """Memory that the KV cache of this rank may take; asked after the weights are loaded.

        ``run_largest_steps`` computes as much at once as will ever be, and returns the bytes that recorded steps will
        take beside it; a device that does not need to know does not call it.
        """

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A large zeroed tensor."""

    def staging(self, nbytes: int, *, kept: int = 0) -> Staging:
        """Memory for the inputs of steps, with ``kept`` bytes on the device that uploads do not touch."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy or a view of ``array`` on the device."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Start bringing ``tensors`` to the host; they may change afterwards."""

    def broken_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [R]: whether some entry of a row of fp32 [R, V] is not finite."""

    def synchronize(self) -> None:
        """Return when everything that was started is done."""

    def trim(self) -> None:
        """Give memory that was let go of back to whoever else wants it."""


def open_device(config: EngineConfig, *, local_rank: int, local_workers: int) -> Device:
    """The device of rank ``local_rank`` of ``local_workers`` on this host, ready to compute.

    Raises ConfigError for a dtype that it cannot compute in, and for a rank without a device of its own.
    """
    threads = choose_threads(len(os.sched_getaffinity(0)), local_workers, os.environ.get("OMP_NUM_THREADS"))
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        from fourfold.worker.cuda_device import open_cuda_device

        return open_cuda_device(config.model.dtype, local_rank=local_rank)
    choice = choose_cpu_dtype(config.model.dtype, cpu_features())
    log.info("local rank %d: cpu, %s: %s; %d thread(s)", local_rank, choice.name, choice.reason, threads)
    return CpuDevice(dtype=choice.dtype, local_workers=local_workers)
