"""One CUDA device: everything is started on its current stream and nothing is waited for but what the host reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.model_config import Dtype
from fourfold.errors import ConfigError

_HOSTS: Final = 4
"""Steps whose inputs the host may have filled before the device has read the first one's."""
_KNOWN_COPIES: Final = 1024
"""Pairs of views that uploads keep; decode steps use a few sizes again and again."""

log = logging.getLogger(__name__)


def open_cuda_device(wanted: Dtype, *, local_rank: int) -> CudaDevice:
    """The device of ``local_rank``, made current; raises ConfigError when there are fewer."""
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this host has no device of its own, since the host shows {count}; lower "
            "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, or show more with "
            "CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local_rank)
    # fp32 means fp32: rounding the factors of a product to tf32 changes tokens.
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.bfloat16 if wanted == "auto" else getattr(torch, wanted)
    device = CudaDevice(index=local_rank, dtype=dtype)
    log.info(
        "local rank %d: %s, %s, %.1f of %.1f GiB free, %s",
        local_rank,
        device.name,
        torch.cuda.get_device_name(local_rank),
        device.free_bytes / 2**30,
        device.memory_bytes / 2**30,
        wanted if wanted != "auto" else "bfloat16",
    )
    return device


class CudaDevice:
    """See ``fourfold.worker.device.Device`` for each member."""

    asynchronous = True

    def __init__(self, *, index: int, dtype: torch.dtype) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.dtype = dtype

    @property
    def memory_bytes(self) -> int:
        """See Device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    @property
    def free_bytes(self) -> int:
        """See Device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def cache_bytes(self, cache: CacheConfig, run_largest_steps: Callable[[], int]) -> int:
        """What --gpu-memory-utilization leaves beside weights and the largest steps.

        Raises ConfigError when that is nothing.
        """
        if cache.kv_cache_memory is not None:
            return cache.kv_cache_memory
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        recorded = run_largest_steps()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        total = self.memory_bytes
        # Of others, of the driver, and of libraries that allocate past torch.
        outside = total - self.free_bytes - torch.cuda.memory_reserved(self.torch_device)
        share = cache.gpu_memory_utilization
        left = int(total * share) - outside - peak - recorded
        log.info(
            "%s: %.2f GiB for the KV cache: %.0f%% of %.1f GiB, less %.2f for weights and the largest steps, %.2f for "
            "recorded steps, %.2f outside",
            self.name,
            *(left / 2**30, share * 100, total / 2**30, peak / 2**30, recorded / 2**30, outside / 2**30),
        )
        if left <= 0:
            least = (total * share - left) / total
            raise ConfigError(
                f"--gpu-memory-utilization {share} of {_gib(total)} is {_gib(total * share)}, and weights, the largest "
                f"step and what others hold take {_gib(total * share - left)}; "
                + (f"raise it above {least:.2f}, or " if least < 1 else "")
                + "lower --max-num-batched-tokens or --max-num-seqs, or cut the model with --tensor-parallel-size"
            )
        return left

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return torch.zeros(*shape, dtype=dtype, device=self.torch_device)

    def staging(self, nbytes: int, *, kept: int = 0) -> PinnedStaging:
        """See Device."""
        return PinnedStaging(nbytes, kept, self.torch_device)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy, through pinned memory: from pageable memory the driver would wait for the device first."""
        host = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return host.to(self.torch_device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PinnedFetch:
        """See Device."""
        return PinnedFetch(tensors)

    def broken_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See Device."""
        # One reading of the rows: an entry that is not finite makes the sum so, and no sum of finite logits overflows.
        sums = rows.sum(-1)
        return sums - sums != 0

    def synchronize(self) -> None:
        """See Device."""
        torch.cuda.synchronize(self.torch_device)

    def trim(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()


class PinnedStaging:
    """Several host buffers in turn, one device buffer; see ``fourfold.worker.device.Staging``."""

    def __init__(self, nbytes: int, kept: int, device: torch.device) -> None:
        self.device = torch.zeros(kept + nbytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(_HOSTS)]
        self.hosts: list[npt.NDArray[np.uint8]] = [tensor.numpy() for tensor in self._pinned]
        self._read = [_event() for _ in range(_HOSTS)]
        self._kept = kept
        self._last = 0
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def claim(self) -> int:
        """See Staging."""
        self._last = (self._last + 1) % _HOSTS
        self._read[self._last].synchronize()
        return self._last

    def upload(self, place: int, nbytes: int) -> None:
        """See Staging."""
        copy = self._copies.get((place, nbytes))
        if copy is None:
            if len(self._copies) >= _KNOWN_COPIES:
                self._copies.clear()
            copy = self.device[self._kept : self._kept + nbytes], self._pinned[place][:nbytes]
            self._copies[place, nbytes] = copy
        copy[0].copy_(copy[1], non_blocking=True)
        self._read[place].record()


class PinnedFetch:
    """Copies into pinned memory and an event after them; see ``fourfold.worker.device.Fetch``."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pinned = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._arrived = _event()
        self._arrived.record()

    def wait(self) -> list[npt.NDArray[Any]]:
        """See Fetch."""
        self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._pinned]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
