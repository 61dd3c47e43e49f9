"""One rank as an executor sees it: methods by name, arguments and replies as msgpack bytes.

Resolves its own plugins, device and backends from names, so that nothing but names travels to it. Decides nothing of
what runs.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fourfold.checkpoints.progress import make_progress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.errors import EngineError
from fourfold.messages import InitializeCache, StepMessage, WorkerInfo
from fourfold.models.loading import load_model
from fourfold.plugins import load_plugins
from fourfold.worker.device import Device, open_device
from fourfold.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from fourfold.entries import WorkerContext
    from fourfold.models.decoder import Decoder


class _Loaded(NamedTuple):
    device: Device
    decoder: Decoder


class Worker:
    """Called in this order: ``load``, ``initialize_cache``, ``warm_up``, then ``execute_model`` for every step."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None
        self._decode_step = msgspec.msgpack.Decoder(StepMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    def load(self) -> bytes:
        """Open the device and load the weights; the reply is a WorkerInfo.

        Raises ConfigError for a dtype, a backend or a checkpoint that cannot work here.
        """
        context, config = self._context, self._context.config
        registry = load_plugins()
        # Every rank of every replica is taken to be on this host, so that they share its cores evenly.
        device = open_device(config, local_rank=context.local_rank, local_workers=context.layout.world_size)
        with closing(make_progress()) as progress:
            checkpoint = resolve_checkpoint(config.model, registry, progress)
            decoder = load_model(
                context, registry, checkpoint, device=device.torch_device, dtype=device.dtype, progress=progress
            )
        self._loaded = _Loaded(device, decoder)
        info = WorkerInfo(
            rank=context.rank,
            device=device.name,
            dtype=str(device.dtype).removeprefix("torch."),
            available_bytes=device.cache_bytes(config.cache),
            memory_bytes=device.memory_bytes,
            kv_cache_specs=decoder.kv_cache_specs(),
            backends=decoder.backends,
        )
        return self._encode(info)

    def initialize_cache(self, message: bytes) -> None:
        """Allocate the KV cache of an InitializeCache, and the state of requests."""
        if self._loaded is None:
            raise EngineError("initialize_cache came before load")
        device, decoder = self._loaded
        config, description = self._context.config, decoder.description
        self._runner = ModelRunner(
            decoder,
            device,
            cache=msgspec.msgpack.decode(message, type=InitializeCache).cache,
            scheduler=config.scheduler,
            max_model_len=config.model.max_model_len or description.max_model_len,
            vocabulary_size=description.vocab_size,
        )

    def warm_up(self) -> None:
        """Run one real prefill and decode, so that the first request finds everything in place."""
        self._ready("warm_up").warm_up()

    def execute_model(self, message: bytes) -> bytes:
        """Run the step of a StepMessage; the reply is a StepOutput."""
        return self._encode(self._ready("execute_model").execute(self._decode_step.decode(message)))

    def check_health(self) -> None:
        """Return when everything that was started on the device is done."""
        if self._loaded is not None:
            self._loaded.device.synchronize()

    def shutdown(self) -> None:
        """Release the model and the cache; idempotent, and safe in any half-built state."""
        runner, self._runner, self._loaded = self._runner, None, None
        if runner is not None:
            runner.close()

    def _ready(self, method: str) -> ModelRunner:
        if self._runner is None:
            raise EngineError(f"{method} came before initialize_cache, or after shutdown")
        return self._runner
