"""The one decoder that every described family is: an embedding, layers, a head. Knows no checkpoint and no request.

T is tokens of a step, H hidden size, R rows to sample, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fourfold.contracts.kv_cache_spec import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import HeadLayer, ParallelLayer
    from fourfold.models.decoder_layer import DecoderLayer
    from fourfold.models.description import ModelDescription
    from fourfold.models.norm_weight import NormWeight


class Decoder:
    """Runs steps. Everything is resolved when it is built; ``forward`` only calls."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        embedding: ParallelLayer,
        layers: Sequence[DecoderLayer],
        final_norm: NormWeight,
        head: HeadLayer,
        operators: Operators,
        backends: dict[str, str],
        dtype: torch.dtype,
        block_size: int,
    ) -> None:
        self.description = description
        self.backends = backends
        """Chosen name of each kind of backend."""
        self.dtype = dtype
        self.operators = operators
        self._block_size = block_size
        self._embedding = embedding
        self._layers = list(layers)
        self._head = head
        epsilon, offset = description.norm_epsilon, description.norm_offset
        self._first_norm: Callable[[torch.Tensor], torch.Tensor] = partial(
            operators.rms_norm, weight=layers[0].parts.input_norm.tensor, epsilon=epsilon, weight_offset=offset
        )
        self._add_norms: list[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = [
            partial(operators.add_rms_norm, weight=norm.tensor, epsilon=epsilon, weight_offset=offset)
            for norm in (*(layer.parts.input_norm for layer in layers[1:]), final_norm)
        ]
        self._scale = description.embedding_scale
        self._soft_cap = description.logit_soft_cap

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """``token_ids`` and ``positions`` int64 [T], a cache and metadata a layer -> normed hidden states [T, H]."""
        residual = self._embedding(token_ids)
        if self._scale != 1.0:
            residual = self.operators.scale(residual, self._scale)
        normed = self._first_norm(residual)
        for layer, add_norm, kv_cache, layer_metadata in zip(
            self._layers, self._add_norms, kv_caches, metadata, strict=True
        ):
            x, residual = layer(normed, residual, positions, kv_cache, layer_metadata)
            normed, residual = add_norm(x, residual)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] as ``forward`` returns it -> fp32 [R, V] on the first rank of the layer, [0, V] on the others."""
        return self.collect_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> this rank's part of the logits; the ranks do not talk meanwhile."""
        logits = self._head.shard(hidden)
        return self.operators.soft_cap(logits, self._soft_cap) if self._soft_cap else logits

    def collect_logits(self, local: torch.Tensor) -> torch.Tensor:
        """What ``local_logits`` gave on every rank -> what ``logits`` returns; the next call may overwrite it."""
        return self._head.collect(local)

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, in ``dtype``."""
        return self._layers[layer].parts.attention.kv_cache_shape(num_blocks, self._block_size)

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """What each of this rank's layers asks of the cache, by layer number."""
        return {
            layer: KVCacheSpec(
                block_size=self._block_size,
                bytes_per_block=math.prod(self.kv_cache_shape(layer, 1)) * self.dtype.itemsize,
                sliding_window=self.description.layers[layer].sliding_window,
            )
            for layer in range(len(self._layers))
        }
