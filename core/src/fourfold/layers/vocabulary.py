"""The two ends of a model, cut by vocabulary rows: embedding and head.

T is tokens, R rows to sample, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.layers.partition import vocabulary_rows

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearMethod, LinearWeight
    from fourfold.contracts.operators import Operators
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
        return self._communicator.all_reduce(self._method.embed(self.weight, x, first_id=self._shard.first))


class ParallelHead:
    """[R, H] -> fp32 logits [R, V] on the group's first rank, [0, V] on the others, in two halves.

    ``tied_weight`` of the context is the embedding's storage where the two share it. Parameters are ``weight`` and
    ``bias``.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        self._method = context.linear_method
        self._communicator = context.communicator
        self._vocab_size = context.out_sizes[0]
        self._shard = _VocabularyShard(context)
        self._weight = context.tied_weight or self._shard.create(context)
        self._rank = context.rank
        self._whole: torch.Tensor | None = None

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's rows."""
        self._shard.load(self._method, self._weight, parameter, tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> fp32 [R, V]; see the class."""
        return self.collect(self.shard(x))

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> fp32 [R, this rank's rows of the vocabulary, padding included]; talks to nobody."""
        return self._method.apply(self._weight, x, out_dtype=torch.float32)

    def collect(self, shard: torch.Tensor) -> torch.Tensor:
        """What ``shard`` gave on every rank -> fp32 [R, V] on the first one, [0, V] on the others.

        The next call may overwrite it.
        """
        if self._communicator is None:
            return shard
        if self._rank != 0:
            self._communicator.gather(shard, destination=0)
            return shard.new_empty(0, self._vocab_size)
        rows, width = shard.shape
        # Kept: fresh memory of this size costs more in page faults than the copy.
        if self._whole is None or self._whole.shape[0] < rows:
            self._whole = shard.new_empty(rows, width * self._communicator.world_size)
        whole = self._whole[:rows]
        self._communicator.gather(shard, destination=0, out=torch.split(whole, width, dim=1))
        return whole[:, : self._vocab_size]

    def best(
        self, shard: torch.Tensor, broken: torch.Tensor, operators: Operators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The id of each row's largest logit, the first of equal ones, without bringing the logits together.

        ``shard`` is what ``shard`` gave, ``broken`` bool [R] says where this rank's part is not finite. Returns int64
        [R], and bool [R] over all parts, both on every rank.
        """
        first, held = self._shard.first, self._shard.stop - self._shard.first
        value = shard.new_full((len(shard),), -torch.inf)
        token_ids = torch.zeros(len(shard), dtype=torch.int64, device=shard.device)
        if held:  # else there are more ranks than the vocabulary needs
            whole = shard if held == shard.shape[1] else shard[:, :held].contiguous()
            token_ids = operators.argmax(whole)
            value = whole.gather(1, token_ids[:, None])[:, 0]
        if self._communicator is None:
            return token_ids, broken
        # fp32 holds every id below 2**24 exactly.
        mine = torch.stack([value.masked_fill(broken, torch.nan), (token_ids + first).float()])
        parts = self._communicator.all_gather(mine).view(self._communicator.world_size, 2, len(shard))
        values, ids = parts.unbind(1)
        chosen = ids.gather(0, values.argmax(0, keepdim=True))[0]
        return chosen.long(), values.isnan().any(0)


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
