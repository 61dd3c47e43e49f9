"""The one decoder that every described family is: an embedding, layers, a head. Knows no checkpoint and no request.

T is tokens of a step, H hidden size, R rows to sample, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import torch

from fourfold.contracts.kv_cache_spec import KVCacheSpec
from fourfold.errors import EngineError
from fourfold.models.microbatches import cut_metadata, cut_tokens

if TYPE_CHECKING:
    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import HeadLayer, ParallelLayer
    from fourfold.contracts.step_part import StepPart
    from fourfold.models.decoder_layer import DecoderLayer
    from fourfold.models.description import ModelDescription
    from fourfold.models.norm_weight import NormWeight
    from fourfold.models.stage_partition import Stage
    from fourfold.models.summing_norm import AddNorm


class Decoder:
    """Runs steps through the layers of one stage: all of them, but for pipelines. Everything is resolved when it is
    built; the methods only call.
    """

    def __init__(
        self,
        description: ModelDescription,
        *,
        stage: Stage,
        embedding: ParallelLayer | None,
        layers: Sequence[DecoderLayer],
        final_norm: NormWeight | None,
        head: HeadLayer | None,
        operators: Operators,
        backends: dict[str, str],
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        block_size: int,
        step_parts: Sequence[StepPart] = (),
    ) -> None:
        """``embedding`` is None beyond the first stage, ``final_norm`` and ``head`` before the last one."""
        self.description = description
        self.stage = stage
        self.backends = backends
        """Chosen name of each kind of backend."""
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.operators = operators
        self.step_parts = tuple(step_parts)
        """What its layers have in common and do between steps."""
        self._block_size = block_size
        self._embedding = embedding
        self._layers = list(layers)
        self._head = head
        epsilon, offset = description.norm_epsilon, description.norm_offset
        rms_norm = partial(operators.rms_norm, epsilon=epsilon, weight_offset=offset)
        add_rms_norm = partial(operators.add_rms_norm, epsilon=epsilon, weight_offset=offset)
        self._first_norm: Callable[[torch.Tensor], torch.Tensor] = partial(
            rms_norm, weight=layers[0].parts.input_norm.tensor
        )
        self._add_norms: list[AddNorm] = [
            partial(add_rms_norm, weight=layer.parts.input_norm.tensor) for layer in layers
        ]
        for index, (before, after) in enumerate(pairwise(layers), start=1):
            if before.parts.leaves_sum and before.parts.summing_norm is not None:
                self._add_norms[index] = before.parts.summing_norm(after.parts.input_norm.tensor)
        self._final_norm = None if final_norm is None else partial(add_rms_norm, weight=final_norm.tensor)
        self._scale = description.embedding_scale
        self._soft_cap = description.logit_soft_cap

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """``token_ids`` and ``positions`` int64 [T], a cache and metadata a layer -> normed hidden states [T, H].

        The stages together: this one must be first and last.
        """
        residual = self.embed(token_ids)
        return self.finish(*self.run_layers(None, residual, positions, kv_caches, metadata))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H], with which the residual begins; on the first stage."""
        if self._embedding is None:
            raise EngineError(f"the stage of layers {self.stage.layers} has no embedding")
        residual = self._embedding(token_ids)
        return residual if self._scale == 1.0 else self.operators.scale(residual, self._scale)

    def run_layers(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` [T, H], still to be added to ``residual`` [T, H], through this stage's layers; both are returned
        as the next stage takes them, and may be overwritten. ``hidden`` is None on the first stage.
        """
        for part in self.step_parts:
            turns = part.take_turns(len(residual))
            if turns is not None:
                halves = self._cut(hidden, residual, positions, kv_caches, metadata)
                (first, first_residual), (second, second_residual) = turns(halves)
                return torch.cat([first, second]), torch.cat([first_residual, second_residual])
        return self._run_layers(hidden, residual, positions, kv_caches, metadata)

    def _cut(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        """``run_layers`` of each half of the tokens."""
        at, _ = cut_tokens(len(residual))
        cut = {id(one): cut_metadata(one, at) for one in metadata}  # layers of one kind share theirs
        return [
            partial(
                self._run_layers,
                None if hidden is None else hidden[tokens],
                residual[tokens],
                positions[tokens],
                kv_caches,
                [cut[id(one)][half] for one in metadata],
            )
            for half, tokens in enumerate((slice(0, at), slice(at, None)))
        ]

    def _run_layers(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden is None:
            normed = self._first_norm(residual)
        else:
            normed, residual = self._add_norms[0](hidden, residual)
        parts = zip(self._layers, kv_caches, metadata, strict=True)
        for (layer, kv_cache, layer_metadata), add_norm in zip_longest(parts, self._add_norms[1:]):
            x, residual = layer(normed, residual, positions, kv_cache, layer_metadata)
            if add_norm is not None:
                normed, residual = add_norm(x, residual)
        return x, residual

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What the last stage's ``run_layers`` returned -> normed hidden states [T, H]."""
        if self._final_norm is None:
            raise EngineError(f"the stage of layers {self.stage.layers} is not the last")
        normed: torch.Tensor = self._final_norm(hidden, residual)[0]
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] as ``forward`` returns it -> fp32 [R, V] on the first rank of the layer, [0, V] on the others."""
        return self.collect_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> this rank's part of the logits; the ranks do not talk meanwhile."""
        logits = self._last().shard(hidden)
        return self.operators.soft_cap(logits, self._soft_cap) if self._soft_cap else logits

    def collect_logits(self, local: torch.Tensor) -> torch.Tensor:
        """What ``local_logits`` gave on every rank -> what ``logits`` returns; the next call may overwrite it."""
        return self._last().collect(local)

    def best_tokens(self, local: torch.Tensor, broken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``local_logits`` gave, and bool [R] where it is not finite -> int64 [R], the largest logit, and
        bool [R] over all ranks; on all of them.
        """
        return self._last().best(local, broken, self.operators)

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; ``layer`` is its number in the whole model."""
        return self._layers[self.stage.layers.index(layer)].parts.attention.kv_cache_shape(num_blocks, self._block_size)

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """What each of this rank's layers asks of the cache, by layer number."""
        return {
            layer: KVCacheSpec(
                block_size=self._block_size,
                bytes_per_block=math.prod(self.kv_cache_shape(layer, 1)) * self.kv_cache_dtype.itemsize,
                sliding_window=self.description.layers[layer].sliding_window,
            )
            for layer in self.stage.layers
        }

    def _last(self) -> HeadLayer:
        if self._head is None:
            raise EngineError(f"the stage of layers {self.stage.layers} has no head")
        return self._head
