"""Linear layers cut over the ranks of a group. Cutting only: the arithmetic is the linear method's.

[T, in] -> [T, out] in the dtype of the input; T is tokens. Column layers return this rank's outputs, the row layer
takes this rank's inputs and returns the sum over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.layers.partition import cut_features, cut_heads

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.linear_method import LinearMethod, LinearWeight
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext


class MergedColumnParallelLinear:
    """Several column layers in one product; each part is cut by itself, so a rank's outputs are part by part.

    Parameters are ``0.weight``, ``0.bias``, ``1.weight`` and so on.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        self._method = context.linear_method
        self._parts = [cut_features(size, context.rank, context.world_size) for size in context.out_sizes]
        self._weight = _create(context, context.in_features, sum(map(len, self._parts)), bias=context.bias)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's rows of one part."""
        part, _, kind = parameter.partition(".")
        index = int(part)
        rows = self._parts[index]
        first = sum(map(len, self._parts[:index]))
        _load_rows(self._method, self._weight, kind, tensor[rows.start : rows.stop], first)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, this rank's outputs, part by part]."""
        return self._method.apply(self._weight, x)


class ColumnParallelLinear:
    """Output features cut over the ranks. Parameters are ``weight`` and ``bias``."""

    def __init__(self, context: ParallelLayerContext) -> None:
        self._merged = MergedColumnParallelLinear(context)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's rows."""
        self._merged.load(f"0.{parameter}", tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, this rank's outputs]."""
        return self._merged(x)


class QKVParallelLinear:
    """Queries, keys and values in one product, cut by heads. Parameters are ``q.weight``, ``k.bias`` and so on."""

    def __init__(self, context: ParallelLayerContext) -> None:
        num_heads, num_kv_heads, head_dim = context.out_sizes
        self._method = context.linear_method
        self._head_dim = head_dim
        self._cut = cut_heads(num_heads, num_kv_heads, context.rank, context.world_size)
        local_heads = len(self._cut.heads) + 2 * len(self._cut.kv_heads)
        self._weight = _create(context, context.in_features, local_heads * head_dim, bias=context.bias)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's heads."""
        part, _, kind = parameter.partition(".")
        cut, dim = self._cut, self._head_dim
        held = cut.heads if part == "q" else cut.kv_heads
        first = {"q": 0, "k": len(cut.heads), "v": len(cut.heads) + len(cut.kv_heads)}[part]
        rows = tensor[held.start * dim : held.stop * dim]
        _load_rows(self._method, self._weight, kind, rows, first * dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, this rank's queries, keys, values]."""
        return self._method.apply(self._weight, x)


class RowParallelLinear:
    """Input features cut over the ranks, results summed. Parameters are ``weight`` and ``bias``.

    The cut of the input follows ``in_heads`` of the context where the input is the output of attention.
    """

    def __init__(self, context: ParallelLayerContext) -> None:
        self._method = context.linear_method
        self._communicator = context.communicator
        self._columns = _input_columns(context)
        # The bias is added once: by the first rank.
        self._has_bias = context.bias and context.rank == 0
        self._weight = _create(context, len(self._columns), context.out_sizes[0], bias=self._has_bias)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's columns."""
        if parameter == "bias":
            if self._has_bias:
                self._method.load_bias(self._weight, tensor[:], first_row=0)
            return
        self._method.load_shard(self._weight, tensor[:, self._columns.start : self._columns.stop], first_row=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's inputs] -> [T, out], whole on every rank."""
        out = self.part(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """See SummedLayer."""
        return self._method.apply(self._weight, x)


def _input_columns(context: ParallelLayerContext) -> range:
    """Of the whole input."""
    if context.in_heads is None:
        return cut_features(context.in_features, context.rank, context.world_size)
    num_heads, num_kv_heads, head_dim = context.in_heads
    heads = cut_heads(num_heads, num_kv_heads, context.rank, context.world_size).heads
    return range(heads.start * head_dim, heads.stop * head_dim)


def _create(context: ParallelLayerContext, in_features: int, out_features: int, *, bias: bool) -> LinearWeight:
    return context.linear_method.create(in_features, out_features, bias=bias, dtype=context.dtype)


def _load_rows(method: LinearMethod, weight: LinearWeight, kind: str, rows: torch.Tensor, first_row: int) -> None:
    """Store rows of a ``weight`` or entries of a ``bias`` from ``first_row`` of the shard on."""
    store = method.load_bias if kind == "bias" else method.load_shard
    store(weight, rows, first_row=first_row)
