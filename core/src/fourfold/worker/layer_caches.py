"""The KV-cache tensors of one rank's layers: taken, given back, taken again. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fourfold.errors import EngineError

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheSpec
    from fourfold.worker.device import Device
    from fourfold.worker.step_inputs import StepInputs


class CachedModel(Protocol):
    """What the caches need of a decoder."""

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Of cache tensors."""

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """Of this rank's layers, in order."""

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Of one layer's cache tensor."""


class LayerCaches:
    """One tensor a layer of this rank."""

    def __init__(self, model: CachedModel, device: Device, cache: KVCacheConfig) -> None:
        layers = list(model.kv_cache_specs())
        groups = {layer: index for index, group in enumerate(cache.groups) for layer in group.layers}
        missing = [layer for layer in layers if layer not in groups]
        if missing:
            listed = ", ".join(map(str, missing))
            raise EngineError(f"no KV-cache group has layer(s) {listed}; engine and worker disagree")
        self._group_of_layer = [groups[layer] for layer in layers]
        self._shapes = [model.kv_cache_shape(layer, cache.num_blocks) for layer in layers]
        self._dtype = model.kv_cache_dtype
        self._device = device
        self.tensors: list[torch.Tensor] = []
        """One a layer; empty while they are given back."""
        self.allocate()

    def allocate(self) -> None:
        """Take zeroed memory, at other addresses than before; nothing happens if it is there."""
        if not self.tensors:
            self.tensors.extend(self._device.zeros(shape, self._dtype) for shape in self._shapes)

    def release(self) -> None:
        """Give the memory back; what it held is lost. Twice is harmless."""
        self.tensors.clear()

    def metadata(self, inputs: StepInputs) -> Sequence[AttentionMetadata]:
        """That of each layer's group."""
        return [inputs.metadata[group] for group in self._group_of_layer]
