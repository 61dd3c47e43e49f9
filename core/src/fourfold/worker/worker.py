"""One rank as an executor sees it: methods by name, arguments and replies as msgpack bytes.

Resolves its own plugins, device and backends from names, so that nothing but names travels to it. Decides nothing of
what runs.
"""

from __future__ import annotations

import gc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fourfold.checkpoints.progress import NoProgress, make_progress
from fourfold.checkpoints.recorded_reading import RecordedFormat
from fourfold.checkpoints.resolve import Checkpoint, resolve_checkpoint
from fourfold.checkpoints.sharded_writing import copy_side_files, write_shard
from fourfold.distributed.connection import connect
from fourfold.errors import ConfigError, EngineError
from fourfold.messages import InitializeCache, StepMessage, WorkerInfo
from fourfold.models.loading import load_model
from fourfold.models.tensor_table import HEAD
from fourfold.plugins import load_plugins
from fourfold.worker.device import Device, open_device
from fourfold.worker.model_runner import ModelRunner
from fourfold.worker.profile import Profile

if TYPE_CHECKING:
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.distributed.model_parallel import ModelParallel
    from fourfold.entries import WorkerContext
    from fourfold.models.decoder import Decoder


class _Loaded(NamedTuple):
    device: Device
    decoder: Decoder
    parallel: ModelParallel
    checkpoint: Checkpoint
    reading: RecordedFormat


class Worker:
    """Called in this order: ``load``, ``initialize_cache``, ``warm_up``, then ``execute_model`` for every step."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None
        self._profile: Profile | None = None
        self._decode_step = msgspec.msgpack.Decoder(StepMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    def load(self) -> bytes:
        """Open the device, meet the other ranks, and load the weights; the reply is a WorkerInfo.

        Raises ConfigError for a dtype, a backend or a checkpoint that cannot work here, RpcTimeout for ranks that do
        not come.
        """
        context, config = self._context, self._context.config
        registry = load_plugins()
        # Every rank of every replica is taken to be on this host, so that they share its cores evenly.
        device = open_device(config, local_rank=context.local_rank, local_workers=context.layout.world_size)
        parallel = connect(context, registry, device=device.torch_device)
        first = context.rank == context.dp_rank == 0  # one bar for all: the ranks load alike
        with closing(make_progress() if first else NoProgress()) as progress:
            checkpoint = resolve_checkpoint(config.model, registry, progress)
            reading = RecordedFormat(checkpoint.format)
            decoder = load_model(
                context,
                registry,
                replace(checkpoint, format=reading),
                device=device.torch_device,
                dtype=device.dtype,
                progress=progress,
                parallel=parallel,
            )
        _check_alike(parallel.tp, decoder.backends)
        self._loaded = _Loaded(device, decoder, parallel, checkpoint, reading)
        info = WorkerInfo(
            rank=context.rank,
            device=device.name,
            dtype=str(device.dtype).removeprefix("torch."),
            available_bytes=device.cache_bytes(config.cache),
            memory_bytes=device.memory_bytes,
            kv_cache_specs=decoder.kv_cache_specs(),
            backends={**decoder.backends, "comm": parallel.communicators},
        )
        return self._encode(info)

    def initialize_cache(self, message: bytes) -> None:
        """Allocate the KV cache of an InitializeCache, and the state of requests."""
        if self._loaded is None:
            raise EngineError("initialize_cache came before load")
        device, decoder, parallel = self._loaded.device, self._loaded.decoder, self._loaded.parallel
        config, description = self._context.config, decoder.description
        self._runner = ModelRunner(
            decoder,
            device,
            cache=msgspec.msgpack.decode(message, type=InitializeCache).cache,
            scheduler=config.scheduler,
            max_model_len=config.model.max_model_len or description.max_model_len,
            vocabulary_size=description.vocab_size,
            parallel=parallel,
        )

    def warm_up(self) -> None:
        """Run one real prefill and decode, so that the first request finds everything in place."""
        self._ready("warm_up").warm_up()

    def settle(self) -> None:
        """Keep the collector from what lives now, in a process that is this rank's alone: it lives for good."""
        gc.collect()
        gc.freeze()

    def execute_model(self, message: bytes) -> bytes:
        """Run the step of a StepMessage; the reply is a StepOutput."""
        return self._encode(self._ready("execute_model").execute(self._decode_step.decode(message)))

    def check_health(self) -> None:
        """Return when everything that was started on the device is done."""
        if self._loaded is not None:
            self._loaded.device.synchronize()

    def save_sharded_state(self, folder: str) -> bytes:
        """Write this rank's part of the weights below ``folder``; the reply is name -> ShardedTensor, for the index."""
        if self._loaded is None:
            raise EngineError("save_sharded_state came before load")
        checkpoint, rank, target = self._loaded.checkpoint, self._context.rank, Path(folder)
        if rank == 0:
            copy_side_files(checkpoint.folder, target)
        tied = {HEAD} if checkpoint.description.tied_embeddings else set()
        regions = {name: parts for name, parts in self._loaded.reading.regions.items() if name not in tied}
        with checkpoint.format.open(checkpoint.folder) as reader:
            return self._encode(write_shard(target, rank, reader, regions))

    def start_profile(self, folder: str) -> None:
        """Trace what this rank does from now on."""
        if self._profile is not None:
            raise ConfigError("a profile is running already; stop it first")
        self._profile = Profile(Path(folder), rank=self._context.rank)

    def stop_profile(self) -> str:
        """Write the trace; the reply is its path."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise ConfigError("no profile is running; start one first")
        return str(profile.stop())

    def shutdown(self) -> None:
        """Release the model and the cache; idempotent, and safe in any half-built state."""
        runner, self._runner = self._runner, None
        loaded, self._loaded = self._loaded, None
        if runner is not None:
            runner.close()
        if loaded is not None:
            loaded.parallel.close()

    def _ready(self, method: str) -> ModelRunner:
        if self._runner is None:
            raise EngineError(f"{method} came before initialize_cache, or after shutdown")
        return self._runner


def _check_alike(group: GroupCoordinator, backends: dict[str, str]) -> None:
    """Refuse backends that differ from the first rank's: they would not run the same collectives."""
    first = group.broadcast_object(backends)
    for kind, name in backends.items():
        if first[kind] != name:
            raise EngineError(
                f"rank {group.ranks[group.rank]} took {name!r} as {kind}, and rank {group.ranks[0]} took "
                f"{first[kind]!r}; name one with --{kind.replace('_', '-')}"
            )
