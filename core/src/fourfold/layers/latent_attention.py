"""Multi-head latent attention: queries, keys and values through narrow latents that are whole on every rank.

The algorithm: "DeepSeek-V2" (2024), section 2.1. What attention sees of it has one of two forms: latents, where all
heads share one key that is its own value, or ordinary heads, for which keys and values are decompressed.
T is tokens, R the latent's size; a head's rotated part comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from fourfold.errors import ConfigError
from fourfold.layers.partition import cut_heads
from fourfold.layers.weight_memory import WeightMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.contracts.parallel_layer import LatentLayer, TensorSlices
    from fourfold.entries import ParallelLayerContext
    from fourfold.models.description import LatentAttentionDescription


class LatentQKVLinear:
    """See ``fourfold.contracts.parallel_layer.LatentLayer``."""

    def __init__(self, context: ParallelLayerContext) -> None:
        latent, operators = context.latent, context.operators
        if latent is None or operators is None:
            raise ConfigError("latent attention needs its description and operators in its context")
        num_heads, num_kv_heads, head_dim = context.out_sizes
        self._latent = latent
        self._heads = cut_heads(num_heads, num_kv_heads, context.rank, context.world_size).heads
        self._method = context.linear_method
        self._rms_norm = operators.rms_norm
        self._form: _Form = (
            _Latents(context, latent, len(self._heads))
            if context.caches_latents
            else _DecompressedHeads(context, latent, len(self._heads), head_dim)
        )
        width = len(self._heads) * self._form.query_dim
        self._weights: dict[str, LinearWeight] = {
            "kv_a": self._create(context, context.in_features, latent.kv_rank + latent.rotary_dim, bias=context.bias)
        }
        ranks = {"kv_norm": latent.kv_rank}
        if latent.query_rank:
            ranks["q_norm"] = latent.query_rank
            self._weights["q_a"] = self._create(context, context.in_features, latent.query_rank, bias=context.bias)
            self._weights["q_b"] = self._create(context, latent.query_rank, width)
        else:
            self._weights["q"] = self._create(context, context.in_features, width)
        self._norms = {
            name: torch.empty(rank, dtype=context.dtype, device=context.device) for name, rank in ranks.items()
        }

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's heads; of latents, everything."""
        name, _, kind = parameter.partition(".")
        if name in self._norms:
            self._norms[name].copy_(tensor[:])
        elif name in ("q_a", "kv_a"):
            rows = tensor[:] if name == "q_a" else self._shared_rows(tensor[:])
            store = self._method.load_bias if kind == "bias" else self._method.load_shard
            store(self._weights[name], rows, first_row=0)
        elif name == "kv_b":
            self._form.load(self._rows_of_heads(tensor, self._latent.fixed_dim + self._latent.value_dim))
        else:
            self._method.load_shard(self._weights[name], self._query_rows(tensor), first_row=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> rows for the attention backend; queries and keys do not rotate yet."""
        apply, weights, latent = self._method.apply, self._weights, self._latent
        if latent.query_rank:
            queries = apply(weights["q_b"], self._norm("q_norm", apply(weights["q_a"], x)))
        else:
            queries = apply(weights["q"], x)
        shared = apply(weights["kv_a"], x)
        normed = self._norm("kv_norm", shared[:, : latent.kv_rank].contiguous())
        return self._form.rows(queries, shared[:, latent.kv_rank :], normed)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention gave -> [T, heads * value_dim]."""
        return self._form.values(attended)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(x, self._norms[name], self._latent.norm_epsilon)

    def _create(
        self, context: ParallelLayerContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> LinearWeight:
        return self._method.create(in_features, out_features, bias=bias, dtype=context.dtype)

    def _query_rows(self, tensor: TensorSlices) -> torch.Tensor:
        """A checkpoint's head is [the rest, rotated part]; here the rotated part is first, and zeros fill it up."""
        fixed, turned = self._latent.fixed_dim, self._latent.rotary_dim
        rows = self._rows_of_heads(tensor, fixed + turned)
        arranged = rows.new_zeros(len(self._heads), self._form.query_dim, rows.shape[2])
        arranged[:, :turned] = self._half_order(rows[:, fixed:])
        arranged[:, turned : turned + fixed] = rows[:, :fixed]
        return arranged.flatten(0, 1)

    def _rows_of_heads(self, tensor: TensorSlices, rows_of_head: int) -> torch.Tensor:
        """[heads, rows of a head, in] of this rank."""
        rows = tensor[self._heads.start * rows_of_head : self._heads.stop * rows_of_head]
        return rows.view(len(self._heads), rows_of_head, -1)

    def _shared_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The latent, then the rotated part of the key that all heads share; of a weight or a bias."""
        rank = self._latent.kv_rank
        return torch.cat((rows[:rank], self._half_order(rows[None, rank:])[0]))

    def _half_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Dim 1 from pairs of neighbours, if that is what rotates, to pairs that are half of it apart."""
        return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1) if self._latent.interleaved else rows


class _Form(Protocol):
    """What attention sees."""

    query_dim: int
    """Outputs of the query projection for each head."""

    def load(self, rows: torch.Tensor) -> None:
        """This rank's heads of ``kv_b`` [heads, fixed + value, R]: key without its rotated part, then value."""

    def rows(self, queries: torch.Tensor, turned: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """[T, heads * query_dim], [T, rotary_dim], [T, R] -> rows for the attention backend."""

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention gave -> [T, heads * value_dim]."""


class _Latents:
    """A head is [rotated part, latent]: keys' decompression is done to queries, values' to what attention gave."""

    def __init__(self, context: ParallelLayerContext, latent: LatentAttentionDescription, num_heads: int) -> None:
        self.query_dim = latent.rotary_dim + latent.fixed_dim
        self._latent = latent
        self._num_heads = num_heads
        memory = context.weight_memory or WeightMemory(context.device)
        self._to_latent = memory.empty(num_heads, latent.fixed_dim, latent.kv_rank, dtype=context.dtype)
        self._to_value = memory.empty(num_heads, latent.value_dim, latent.kv_rank, dtype=context.dtype)

    def load(self, rows: torch.Tensor) -> None:
        """See _Form."""
        self._to_latent.copy_(rows[:, : self._latent.fixed_dim])
        self._to_value.copy_(rows[:, self._latent.fixed_dim :])

    def rows(self, queries: torch.Tensor, turned: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """See _Form: the queries, then the one key."""
        rotary, count = self._latent.rotary_dim, self._num_heads
        queries = queries.view(len(queries), count, self.query_dim)
        rows = queries.new_empty(len(queries), count + 1, rotary + self._latent.kv_rank)
        rows[:, :count, :rotary] = queries[..., :rotary]
        rows[:, :count, rotary:] = torch.matmul(queries[..., rotary:].transpose(0, 1), self._to_latent).transpose(0, 1)
        rows[:, count, :rotary] = turned
        rows[:, count, rotary:] = latents
        return rows.flatten(1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """See _Form."""
        heads = attended.view(len(attended), self._num_heads, -1)[..., self._latent.rotary_dim :]
        return torch.matmul(heads.transpose(0, 1), self._to_value.transpose(1, 2)).transpose(0, 1).flatten(1)


class _DecompressedHeads:
    """A head is [rotated part, the rest, zeros], where the zeros make queries and keys as wide as values or values as
    wide as keys; so any attention backend serves, and caches whole heads.
    """

    def __init__(
        self, context: ParallelLayerContext, latent: LatentAttentionDescription, num_heads: int, head_dim: int
    ) -> None:
        self.query_dim = head_dim
        self._latent = latent
        self._num_heads = num_heads
        self._method = context.linear_method
        self._weight = self._method.create(latent.kv_rank, 2 * num_heads * head_dim, bias=False, dtype=context.dtype)

    def load(self, rows: torch.Tensor) -> None:
        """See _Form: all keys come before all values."""
        fixed, turned, value = self._latent.fixed_dim, self._latent.rotary_dim, self._latent.value_dim
        arranged = rows.new_zeros(2, self._num_heads, self.query_dim, rows.shape[2])
        arranged[0, :, turned : turned + fixed] = rows[:, :fixed]
        arranged[1, :, :value] = rows[:, fixed:]
        self._method.load_shard(self._weight, arranged.flatten(0, 2), first_row=0)

    def rows(self, queries: torch.Tensor, turned: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """See _Form."""
        count = self._num_heads
        qkv = torch.cat((queries, self._method.apply(self._weight, latents)), dim=1)
        keys = qkv.view(len(qkv), 3 * count, self.query_dim)[:, count : 2 * count]
        keys[..., : self._latent.rotary_dim] = turned[:, None]
        return qkv

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """See _Form."""
        heads = attended.view(len(attended), self._num_heads, self.query_dim)
        return heads[..., : self._latent.value_dim].flatten(1)


class ValueOutput:
    """The output layer behind latent attention, whose heads are wider than values, or are no values yet."""

    def __init__(self, latents: LatentLayer, output: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._latents = latents
        self._output = output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What attention gave -> [T, H]."""
        return self._output(self._latents.values(x))
