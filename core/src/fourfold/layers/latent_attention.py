"""Multi-head latent attention, decompressed: queries, keys and values come out as ordinary heads, cut by heads.

The algorithm: "DeepSeek-V2" (2024), section 2.1. A head is [rotated part, the rest, zeros], where the zeros make
queries and keys as wide as values or values as wide as keys; so any attention backend serves, and caches whole heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.errors import ConfigError
from fourfold.layers.partition import cut_heads

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class LatentQKVLinear:
    """[T, H] -> [T, this rank's queries, keys, values], through narrow latents that are whole on every rank.

    Parameters are ``q.weight``, or ``q_a.weight``, ``q_a.bias``, ``q_norm.weight`` and ``q_b.weight`` where queries
    have a latent too; ``kv_a.weight``, ``kv_a.bias``, ``kv_norm.weight`` and ``kv_b.weight``.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        latent, operators = context.latent, context.operators
        if latent is None or operators is None:
            raise ConfigError("latent attention needs its description and operators in its context")
        num_heads, num_kv_heads, self._head_dim = context.out_sizes
        self._latent = latent
        self._heads = cut_heads(num_heads, num_kv_heads, context.rank, context.world_size).heads
        self._method = context.linear_method
        self._rms_norm = operators.rms_norm
        width = len(self._heads) * self._head_dim
        self._weights: dict[str, LinearWeight] = {
            "kv_a": self._create(context, context.in_features, latent.kv_rank + latent.rotary_dim, bias=context.bias),
            "kv_b": self._create(context, latent.kv_rank, 2 * width),
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
        else:
            arrange = self._key_value_rows if name == "kv_b" else self._query_rows
            self._method.load_shard(self._weights[name], arrange(tensor), first_row=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, 3 * heads * head_dim]; queries and keys do not rotate yet."""
        apply, weights, latent = self._method.apply, self._weights, self._latent
        if latent.query_rank:
            queries = apply(weights["q_b"], self._norm("q_norm", apply(weights["q_a"], x)))
        else:
            queries = apply(weights["q"], x)
        shared = apply(weights["kv_a"], x)
        keys_values = apply(weights["kv_b"], self._norm("kv_norm", shared[:, : latent.kv_rank].contiguous()))
        qkv = torch.cat((queries, keys_values), dim=1)
        count = len(self._heads)
        keys = qkv.view(len(x), 3 * count, self._head_dim)[:, count : 2 * count]
        keys[..., : latent.rotary_dim] = shared[:, None, latent.kv_rank :]
        return qkv

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(x, self._norms[name], self._latent.norm_epsilon)

    def _create(
        self, context: ParallelLayerContext, in_features: int, out_features: int, *, bias: bool = False
    ) -> LinearWeight:
        return self._method.create(in_features, out_features, bias=bias, dtype=context.dtype)

    def _query_rows(self, tensor: TensorSlices) -> torch.Tensor:
        """A checkpoint's head is [the rest, rotated part]."""
        fixed, turned = self._latent.fixed_dim, self._latent.rotary_dim
        rows = self._rows_of_heads(tensor, fixed + turned)
        arranged = rows.new_zeros(len(self._heads), self._head_dim, rows.shape[2])
        arranged[:, :turned] = self._half_order(rows[:, fixed:])
        arranged[:, turned : turned + fixed] = rows[:, :fixed]
        return arranged.flatten(0, 1)

    def _key_value_rows(self, tensor: TensorSlices) -> torch.Tensor:
        """A checkpoint's head is [key without its rotated part, value]; here all keys come before all values."""
        fixed, turned, value = self._latent.fixed_dim, self._latent.rotary_dim, self._latent.value_dim
        rows = self._rows_of_heads(tensor, fixed + value)
        arranged = rows.new_zeros(2, len(self._heads), self._head_dim, rows.shape[2])
        arranged[0, :, turned : turned + fixed] = rows[:, :fixed]
        arranged[1, :, :value] = rows[:, fixed:]
        return arranged.flatten(0, 2)

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


class ValueOutput:
    """The output layer behind heads that are wider than values: takes the values' part of each."""

    def __init__(self, output: Callable[[torch.Tensor], torch.Tensor], *, head_dim: int, value_dim: int) -> None:
        self._output = output
        self._head_dim = head_dim
        self._value_dim = value_dim

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads * head_dim] -> [T, H]."""
        heads = x.view(len(x), -1, self._head_dim)[..., : self._value_dim]
        return self._output(heads.flatten(1))
