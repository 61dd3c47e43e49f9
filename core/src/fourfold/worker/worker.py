"""One rank as an executor sees it: methods by name, arguments and replies as msgpack bytes.

Resolves its own plugins, device and backends from names, so that nothing but names travels to it. Decides nothing of
what runs.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from fourfold.checkpoints.progress import NoProgress, make_progress
from fourfold.checkpoints.resolve import AUTO, Checkpoint, resolve_checkpoint
from fourfold.checkpoints.sharded_writing import copy_side_files, write_shard
from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.distributed.connection import connect
from fourfold.distributed.stage_transport import StageTransport
from fourfold.errors import ConfigError, EngineError
from fourfold.messages import InitializeCache, StageFigures, StepMessage, WorkerInfo
from fourfold.models.adapter_file import read_adapter
from fourfold.models.loading import build_model, load_model
from fourfold.models.tensor_table import HEAD
from fourfold.plugins import load_plugins
from fourfold.sleep_tags import KV_CACHE, WEIGHTS
from fourfold.worker.device import Device, open_device
from fourfold.worker.memory_advice import (
    cache_does_not_fit,
    explained,
    step_does_not_fit,
    warm_up_does_not_fit,
    weights_do_not_fit,
)
from fourfold.worker.model_runner import ModelRunner
from fourfold.worker.model_weights import ModelWeights
from fourfold.worker.pipeline_stage import PipelineStage
from fourfold.worker.profile import Profile
from fourfold.worker.stage_choice import choose_stage
from fourfold.worker.stage_timing import time_parts

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.distributed.model_parallel import ModelParallel
    from fourfold.entries import WorkerContext
    from fourfold.models.adapters import AdapterSlots
    from fourfold.models.decoder import Decoder
    from fourfold.models.stage_partition import Stage, StageCosts
    from fourfold.plugins import PluginRegistry
    from fourfold.worker.launched_step import LaunchedStep
    from fourfold.worker.request_state import RequestState


_STEPS_BETWEEN_COUNTERS: Final = 32


class _Loaded(NamedTuple):
    device: Device
    decoder: Decoder
    parallel: ModelParallel
    weights: ModelWeights
    adapters: AdapterSlots | None


class Worker:
    """Called in this order: ``load``, ``initialize_cache``, ``warm_up``, then ``execute_model`` for every step."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None
        self._profile: Profile | None = None
        self._busy_seconds = 0.0
        self._num_steps = 0
        self._asynchronous = False
        self._decode_step = msgspec.msgpack.Decoder(StepMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    def load(self) -> bytes:
        """Open the device, meet the other ranks, and load the weights; the reply is a WorkerInfo.

        Raises ConfigError for a dtype, a backend or a checkpoint that cannot work here, RpcTimeout for ranks that do
        not come.
        """
        context, config = self._context, self._context.config
        registry = load_plugins()
        # The ranks of a host share its cores evenly.
        local_workers = context.local_workers or context.layout.world_size
        device = open_device(config, local_rank=context.local_rank, local_workers=local_workers)
        parallel = connect(context, registry, device=device.torch_device)
        first = context.rank == context.dp_rank == 0  # one bar for all: the ranks load alike
        with closing(make_progress() if first else NoProgress()) as progress:
            checkpoint = resolve_checkpoint(config.model, registry, progress, device=device.torch_device)
            measure = partial(_measure, context, registry, checkpoint, device, parallel)
            stage = choose_stage(config, checkpoint.description, parallel, device, measure)
            free = device.free_bytes
            with explained(lambda: weights_do_not_fit(checkpoint.description, config, device, free=free)):
                built = build_model(
                    context,
                    registry,
                    checkpoint.description,
                    device=device.torch_device,
                    dtype=device.dtype,
                    parallel=parallel,
                    stage=stage,
                )
                weights = ModelWeights(built, checkpoint)
                weights.fill(progress)
        decoder = built.decoder
        _check_alike(parallel.tp, decoder.backends)
        self._loaded = _Loaded(device, decoder, parallel, weights, built.adapters)
        self._asynchronous = device.asynchronous
        info = WorkerInfo(
            rank=context.rank,
            device=device.name,
            dtype=str(device.dtype).removeprefix("torch."),
            asynchronous=device.asynchronous,
            available_bytes=device.cache_bytes(config.cache, self._run_largest_step),
            memory_bytes=device.memory_bytes,
            kv_cache_specs=decoder.kv_cache_specs(),
            backends={**decoder.backends, "comm": parallel.communicators},
        )
        return self._encode(info)

    def initialize_cache(self, message: bytes) -> None:
        """Allocate the KV cache of an InitializeCache, and the state of requests."""
        loaded, config = self._need_loaded("initialize_cache"), self._context.config
        cache = msgspec.msgpack.decode(message, type=InitializeCache).cache
        specs = loaded.decoder.kv_cache_specs().values()
        nbytes, free = cache.num_blocks * sum(spec.bytes_per_block for spec in specs), loaded.device.free_bytes
        with explained(lambda: cache_does_not_fit(config, loaded.device, nbytes=nbytes, free=free)):
            self._runner = self._build_runner(loaded, cache)

    def warm_up(self) -> None:
        """Run one real prefill and decode, so that the first request finds everything in place."""
        runner, loaded = self._ready("warm_up"), self._need_loaded("warm_up")
        with explained(lambda: warm_up_does_not_fit(self._context.config, loaded.device)):
            runner.warm_up()

    def settle(self) -> None:
        """Keep the collector from what lives now, in a process that is this rank's alone: it lives for good."""
        gc.collect()
        gc.freeze()

    def execute_model(self, message: bytes) -> bytes | DeferredReply:
        """Run the step of a StepMessage; the reply is a StepOutput, deferred where the device works by itself."""
        runner = self._ready("execute_model")
        started, waited = time.perf_counter(), runner.waited_seconds
        launched = runner.launch(self._decode_step.decode(message))
        counters = self._counters_of_step()
        reply = None if self._asynchronous else self._reply(launched, counters)
        for part in self._need_loaded("execute_model").decoder.step_parts:
            part.end_step()
        self._busy_seconds += time.perf_counter() - started - (runner.waited_seconds - waited)
        return DeferredReply(lambda: self._reply(launched, counters)) if reply is None else reply

    def stage_figures(self) -> bytes:
        """The StageFigures of this rank."""
        return self._encode(StageFigures(busy_seconds=self._busy_seconds, counters=self._layer_counters()))

    def layer_report(self) -> bytes:
        """What the layers of this rank show, as msgpack of a map; see ``StepPart.report``."""
        parts = self._need_loaded("layer_report").decoder.step_parts
        return self._encode({name: value for part in parts for name, value in part.report().items()})

    def check_health(self) -> None:
        """Return when everything that was started on the device is done."""
        if self._loaded is not None:
            self._loaded.device.synchronize()

    def save_sharded_state(self, folder: str) -> bytes:
        """Write this rank's part of the weights below ``folder``; the reply is name -> ShardedTensor, for the index."""
        loaded = self._need_loaded("save_sharded_state")
        checkpoint, rank, target = loaded.weights.checkpoint, self._context.rank, Path(folder)
        if rank == 0:
            copy_side_files(checkpoint.folder, target)
        tied = {HEAD} if checkpoint.description.tied_embeddings else set()
        regions = {name: parts for name, parts in loaded.weights.reading.regions.items() if name not in tied}
        with checkpoint.format.open(checkpoint.folder) as reader:
            return self._encode(write_shard(target, rank, reader, regions))

    def sleep(self, level: int) -> None:
        """Give the memory of the KV cache back, and that of the weights: at level 1 they go to the host's memory, at
        level 2 they are lost. Again at a higher level is another step down.
        """
        loaded, runner = self._need_loaded("sleep"), self._ready("sleep")
        runner.release_cache()
        loaded.weights.release(keep=level == 1)
        loaded.device.trim()

    def wake_up(self, tags: list[str], complete: bool) -> None:
        """Take the memory named by ``tags`` again, and read weights that are lost from their checkpoint.

        ``complete``: nothing sleeps after that. Raises CheckpointError; then weights are still lost.
        """
        loaded, runner = self._need_loaded("wake_up"), self._ready("wake_up")
        if WEIGHTS in tags:
            loaded.weights.restore()
        if KV_CACHE in tags:
            runner.restore_cache()
        if complete:
            runner.record_steps()

    def check_weights(self, model: str) -> None:
        """Raise ConfigError for a model whose weights cannot take the place of those that are here."""
        self._need_loaded("check_weights").weights.check(self._find(model))

    def discard_weights(self) -> None:
        """Let go of the weights on this rank, and of what replicas share; ``load_weights`` brings others."""
        self._need_loaded("discard_weights").weights.discard()

    def load_weights(self, model: str) -> None:
        """Read the weights of another model of the same shape; raises CheckpointError, after which they are lost."""
        self._need_loaded("load_weights").weights.replace(self._find(model))

    def load_adapter(self, slot: int, folder: str) -> None:
        """Read a LoRA adapter into a slot. Raises ConfigError for one that does not fit, and then the slot is empty."""
        loaded = self._need_loaded("load_adapter")
        max_rank = self._context.config.lora.max_lora_rank
        adapter = read_adapter(Path(folder), loaded.decoder.description, max_rank=max_rank)
        self._adapter_slots(loaded).load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot; nothing happens if it is."""
        self._adapter_slots(self._need_loaded("unload_adapter")).drop(slot)

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
            for part in loaded.decoder.step_parts:
                part.close()
            loaded.parallel.close()

    def _adapter_slots(self, loaded: _Loaded) -> AdapterSlots:
        if loaded.adapters is None:
            raise ConfigError("this engine takes no LoRA adapters; start it with --enable-lora")
        return loaded.adapters

    def _find(self, model: str) -> Checkpoint:
        """Another checkpoint, in a format that is found by itself."""
        config = replace(self._context.config.model, model=model, revision=None, load_format=AUTO)
        device = self._need_loaded("load_weights").device.torch_device
        return resolve_checkpoint(config, load_plugins(), NoProgress(), device=device)

    def _run_largest_step(self) -> int:
        """See ``ModelRunner.run_largest_step``; in a cache of a block, which is gone afterwards."""
        loaded, config = self._need_loaded("run_largest_step"), self._context.config
        groups: dict[KVCacheSpec, list[int]] = {}
        for layer, spec in loaded.decoder.kv_cache_specs().items():
            groups.setdefault(spec, []).append(layer)
        cache = KVCacheConfig(
            groups=tuple(KVCacheGroup(spec=spec, layers=tuple(layers)) for spec, layers in groups.items()), num_blocks=1
        )
        with explained(lambda: step_does_not_fit(config, loaded.device)):
            runner = self._build_runner(loaded, cache)
            try:
                return runner.run_largest_step()
            finally:
                runner.close()

    def _build_runner(self, loaded: _Loaded, cache: KVCacheConfig) -> ModelRunner:
        config, description = self._context.config, loaded.decoder.description
        return ModelRunner(
            loaded.decoder,
            loaded.device,
            cache=cache,
            scheduler=config.scheduler,
            max_model_len=config.model.max_model_len or description.max_model_len,
            vocabulary_size=description.vocab_size,
            parallel=loaded.parallel,
            adapters=loaded.adapters,
            join=None if loaded.parallel.pp.world_size == 1 else partial(_join, config, loaded),
            step_parts=loaded.decoder.step_parts,
            lockstep=config.parallel.lockstep,
        )

    def _counters_of_step(self) -> dict[str, float]:
        """Every some steps what the layers count, and nothing in between. A pipeline is asked for it, as all stages."""
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_COUNTERS or self._need_loaded("execute_model").parallel.pp.world_size > 1:
            return {}
        return self._layer_counters()

    def _layer_counters(self) -> dict[str, float]:
        parts = self._need_loaded("stage_figures").decoder.step_parts
        return {name: value for part in parts for name, value in part.counters().items()}

    def _reply(self, launched: LaunchedStep, counters: dict[str, float]) -> bytes:
        output = launched.result()
        return self._encode(msgspec.structs.replace(output, counters=counters) if counters else output)

    def _need_loaded(self, method: str) -> _Loaded:
        if self._loaded is None:
            raise EngineError(f"{method} came before load")
        return self._loaded

    def _ready(self, method: str) -> ModelRunner:
        if self._runner is None:
            raise EngineError(f"{method} came before initialize_cache, or after shutdown")
        return self._runner


def _measure(
    context: WorkerContext,
    registry: PluginRegistry,
    checkpoint: Checkpoint,
    device: Device,
    parallel: ModelParallel,
) -> StageCosts:
    def load(stage: Stage) -> Decoder:
        return load_model(
            context,
            registry,
            checkpoint,
            device=device.torch_device,
            dtype=device.dtype,
            progress=NoProgress(),
            parallel=parallel,
            stage=stage,
        )

    config = context.config
    return time_parts(
        checkpoint.description,
        device,
        load,
        num_requests=-(-config.scheduler.max_num_seqs // parallel.pp.world_size),
        group=parallel.tp,
        recorded=not (config.scheduler.enforce_eager or config.parallel.lockstep),
    )


def _join(config: EngineConfig, loaded: _Loaded, state: RequestState) -> PipelineStage:
    """Connect this rank to the stages before and after it; all ranks must."""
    device, decoder, parallel = loaded.device, loaded.decoder, loaded.parallel
    depth = config.scheduler.max_in_flight or parallel.pp.world_size + 1
    transport = StageTransport(
        parallel,
        device.torch_device,
        hidden_size=decoder.description.hidden_size,
        dtype=decoder.dtype,
        max_tokens=config.scheduler.max_num_batched_tokens,
        depth=depth,
    )
    return PipelineStage(decoder, transport, state, device, depth=depth)


def _check_alike(group: GroupCoordinator, backends: dict[str, str]) -> None:
    """Refuse backends that differ from the first rank's: they would not run the same collectives."""
    first = group.broadcast_object(backends)
    for kind, name in backends.items():
        if first[kind] != name:
            raise EngineError(
                f"rank {group.ranks[group.rank]} took {name!r} as {kind}, and rank {group.ranks[0]} took "
                f"{first[kind]!r}; name one with --{kind.replace('_', '-')}"
            )
