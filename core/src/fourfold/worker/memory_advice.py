"""What to say when a device has too little memory: which setting to lower, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fourfold.errors import ConfigError
from fourfold.models.tensor_table import HEAD, checkpoint_tensors

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.models.description import ModelDescription
    from fourfold.worker.device import Device


@contextmanager
def explained(advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of device memory into a ConfigError that says what ``advice`` returns then."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(advice()) from error


def weights_do_not_fit(description: ModelDescription, config: EngineConfig, device: Device, *, free: int) -> str:
    """For the loading of weights, before which ``free`` bytes were there."""
    shapes = checkpoint_tensors(description)
    elements = sum(
        math.prod(shape) for name, shape in shapes.items() if name != HEAD or not description.tied_embeddings
    )
    ranks = config.parallel.tensor_parallel_size
    needed = elements * device.dtype.itemsize // ranks
    return (
        f"the weights take about {_gib(needed)} a rank, and {device.name} had {_gib(free)} free; raise "
        f"--tensor-parallel-size from {ranks} to {ranks * max(2, math.ceil(needed / max(1, free)))} or more"
    )


def step_does_not_fit(config: EngineConfig, device: Device) -> str:
    """For the largest step beside the weights."""
    scheduler = config.scheduler
    tokens, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    return (
        f"a step of --max-num-batched-tokens {tokens} and --max-num-seqs {requests} does not fit beside the weights on "
        f"{device.name}, which has {_gib(device.memory_bytes)}; lower them to {max(1, tokens // 2)} and "
        f"{max(1, min(requests, tokens // 2) // 2)}"
    )


def cache_does_not_fit(config: EngineConfig, device: Device, *, nbytes: int, free: int) -> str:
    """For a KV cache of ``nbytes``, before which ``free`` bytes were there."""
    missing = max(nbytes - free, 0)
    lower = _lower_utilization(config, device, missing)
    if config.cache.kv_cache_memory is not None or config.cache.num_blocks is not None:
        given = "--kv-cache-memory" if config.cache.num_blocks is None else "--num-blocks"
        lower = f"lower {given} by at least {missing / nbytes:.0%}"
    return f"the KV cache takes {_gib(nbytes)}, and {device.name} had {_gib(free)} free; {lower}"


def warm_up_does_not_fit(config: EngineConfig, device: Device) -> str:
    """For the first steps and the recording of decode steps, when the cache is there."""
    missing = int(0.05 * device.memory_bytes)
    lower = _lower_utilization(config, device, missing)
    if config.cache.kv_cache_memory is not None:
        lower = f"lower --kv-cache-memory by {missing} bytes"
    return (
        f"{device.name} has {_gib(device.free_bytes)} free beside weights and KV cache, too little to record decode "
        f"steps; {lower}, or run without recorded steps: --enforce-eager"
    )


def _lower_utilization(config: EngineConfig, device: Device, missing: int) -> str:
    share = config.cache.gpu_memory_utilization
    by = math.ceil(100 * missing / device.memory_bytes + 1) / 100
    return f"lower --gpu-memory-utilization from {share:g} by {by:.2f}, to {max(0.01, share - by):.2f}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
