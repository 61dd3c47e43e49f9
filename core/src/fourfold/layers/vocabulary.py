"""The two ends of a model, cut by vocabulary rows: embedding and head.

T is tokens, R rows to sample, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.layers.partition import vocabulary_rows

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearMethod, LinearWeight
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class VocabParallelEmbedding:
    """int64 [T] -> [T, H]: each rank looks up the ids it holds, and the sum over the ranks is the embedding.

    ``in_features`` of the context is H, ``out_sizes`` is (V,). The parameter is ``weight``.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        self._method = context.linear_method
        self._communicator = context.communicator
        self._shard = _VocabularyShard(context)
        self.weight: LinearWeight = self._shard.create(context)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's rows."""
        self._shard.load(self._method, self.weight, parameter, tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H], whole on every rank."""
        if self._communicator is None:
            return self._method.embed(self.weight, x)
        local = x - self._shard.first
        elsewhere = (local < 0) | (local >= self._shard.rows)
        embedded = self._method.embed(self.weight, local.masked_fill(elsewhere, 0))
        return self._communicator.all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelHead:
    """[R, H] -> fp32 logits [R, V] on the group's first rank, [0, V] on the others.

    ``tied_weight`` of the context is the embedding's storage where the two share it. Parameters are ``weight`` and
    ``bias``.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        self._method = context.linear_method
        self._communicator = context.communicator
        self._vocab_size = context.out_sizes[0]
        self._shard = _VocabularyShard(context)
        self._weight = context.tied_weight or self._shard.create(context)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's rows."""
        self._shard.load(self._method, self._weight, parameter, tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> fp32 [R, V]; see the class."""
        logits = self._method.apply(self._weight, x, out_dtype=torch.float32)
        if self._communicator is None:
            return logits
        shards = self._communicator.gather(logits, destination=0)
        if shards is None:
            return logits.new_empty(0, self._vocab_size)
        return torch.cat(shards, dim=1)[:, : self._vocab_size].contiguous()


class _VocabularyShard:
    """The rows of one rank; every rank has equally many, the last ones may be padding."""

    def __init__(self, context: ParallelLayerContext) -> None:
        vocab_size = context.out_sizes[0]
        self.rows = vocabulary_rows(vocab_size, context.world_size)
        self.first = min(self.rows * context.rank, vocab_size)
        self.stop = min(self.first + self.rows, vocab_size)

    def create(self, context: ParallelLayerContext) -> LinearWeight:
        return context.linear_method.create(context.in_features, self.rows, bias=context.bias, dtype=context.dtype)

    def load(self, method: LinearMethod, weight: LinearWeight, parameter: str, tensor: TensorSlices) -> None:
        held = self.stop - self.first
        padding = self.rows - held
        rows = tensor[self.first : self.stop]
        if parameter == "bias":
            method.load_bias(weight, rows, first_row=0)
            method.load_bias(weight, torch.zeros(padding), first_row=held)
            return
        method.load_shard(weight, rows, first_row=0)
        if padding:
            method.load_shard(weight, torch.zeros(padding, tensor.shape[1]), first_row=held)
