"""Paged attention in plain torch: gathers each sequence's blocks and attends with an fp32 softmax.

The twin that every faster backend is compared with. S is sequences, T tokens, L context length, D head_dim, K kv heads,
G query heads of the kv head that serves most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.layers.scaled_rows import SCALE_BYTES, pack_rows, unpack_rows

if TYPE_CHECKING:
    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.entries import AttentionContext

_QUERY_CHUNK = 256
"""Queries of one sequence that attend at a time; bounds the scores to heads x 256 x context."""


class TorchAttention:
    """One layer's attention. The cache is [2, blocks, block_size, K, D]: keys, then values; in fp8 scaled rows.

    Where values are keys there is one of the two.
    """

    def __init__(self, context: AttentionContext) -> None:
        self._spec = context.spec
        self._scaled = context.cache_dtype is torch.float8_e4m3fn
        groups = context.spec.groups
        self._group = max(groups)
        # Where the groups differ, all are as wide as the widest: empty places repeat a head, and nobody reads them.
        self._heads: torch.Tensor | None = None
        self._places: torch.Tensor | None = None
        if len(set(groups)) > 1:
            firsts = [sum(groups[:index]) for index in range(len(groups))]
            heads = [
                first + min(place, size - 1) for first, size in zip(firsts, groups) for place in range(self._group)
            ]
            places = [index * self._group + place for index, size in enumerate(groups) for place in range(size)]
            self._heads = torch.tensor(heads, device=context.device)
            self._places = torch.tensor(places, device=context.device)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[2, blocks, block_size, K, D], where scales add to D; [1, ...] where values are keys."""
        width = self._spec.head_dim + (SCALE_BYTES if self._scaled else 0)
        return (1 if self._spec.shared_values else 2, num_blocks, block_size, self._spec.num_kv_heads, width)

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See the contract."""
        spec = self._spec
        if self._scaled:
            kv_cache = kv_cache.view(torch.uint8)  # which can be indexed everywhere
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        turned = heads[:, : spec.num_heads + spec.num_kv_heads]
        if cos_sin is not None and spec.rotary_dim:
            turned = _rotate(turned, cos_sin[positions], spec.rotary_dim)
        queries, keys = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        self._write(kv_cache, keys, heads[:, spec.num_heads + spec.num_kv_heads :], metadata.slot_mapping)
        out = self._attend(queries, kv_cache, metadata)
        return out.reshape(qkv.shape[0], spec.num_heads * spec.head_dim)

    def _write(self, kv_cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        rows = kv_cache.flatten(1, 2)
        kept = slots >= 0
        if not bool(kept.all()):
            keys, values, slots = keys[kept], values[kept], slots[kept]
        for target, source in zip(rows, (keys, values)):  # shared values are keys, and not there
            target.index_copy_(0, slots, pack_rows(source) if self._scaled else source.to(kv_cache.dtype))

    def _attend(self, queries: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        starts = metadata.query_start_list
        num_sequences = len(metadata.sequence_lengths_list)
        if metadata.max_query_length == 1 and starts[num_sequences] == num_sequences:
            return self._attend_decodes(queries, kv_cache, metadata, slice(0, num_sequences))
        out = torch.zeros_like(queries)
        first_decode = None
        for sequence in range(num_sequences + 1):
            last = sequence == num_sequences
            start = starts[sequence]
            length = 0 if last else starts[sequence + 1] - start
            if length == 1:
                first_decode = sequence if first_decode is None else first_decode
                continue
            if first_decode is not None:
                rows = slice(starts[first_decode], start)
                sequences = slice(first_decode, sequence)
                out[rows] = self._attend_decodes(queries[rows], kv_cache, metadata, sequences)
                first_decode = None
            if length:
                rows = slice(start, start + length)
                out[rows] = self._attend_sequence(queries[rows], kv_cache, metadata, sequence)
        return out

    def _attend_decodes(
        self, queries: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, sequences: slice
    ) -> torch.Tensor:
        """One query each for neighbouring sequences: [S, heads, D] -> the same."""
        spec, block_size = self._spec, kv_cache.shape[2]
        lengths = metadata.sequence_lengths[sequences].to(torch.int64).unsqueeze(1)
        longest = max(metadata.sequence_lengths_list[sequences])
        num_blocks = -(-longest // block_size)
        context = torch.arange(num_blocks * block_size, device=queries.device).unsqueeze(0)
        visible = context < lengths
        # Entries past a sequence's blocks are undefined and must not be followed; block 0 always exists.
        table = metadata.block_table[sequences, :num_blocks].to(torch.int64)
        table = torch.where(visible[:, ::block_size], table, 0)
        if spec.sliding_window:
            visible &= context >= lengths - spec.sliding_window
        cached = self._read(kv_cache[:, table].flatten(2, 3))
        keys, values = cached[0], cached[-1]
        # Cache memory that was never written may hold NaN, which a weight of zero does not remove.
        values = values.masked_fill(~visible[:, :, None, None], 0)
        grouped = self._grouped(queries).float()
        scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1))
        weights = self._softmax(scores, visible[:, None, None, :])
        out = torch.matmul(weights, values.transpose(1, 2))
        return self._ungrouped(out).to(queries.dtype)

    def _attend_sequence(
        self, queries: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, sequence: int
    ) -> torch.Tensor:
        """All queries of one sequence, the last of its context: [n, heads, D] -> the same."""
        spec, block_size = self._spec, kv_cache.shape[2]
        length = metadata.sequence_lengths_list[sequence]
        table = metadata.block_table[sequence, : -(-length // block_size)].to(torch.int64)
        cached = self._read(kv_cache[:, table].flatten(1, 2)[:, :length]).transpose(1, 2)
        keys, values = cached[0], cached[-1]
        computed = length - queries.shape[0]
        out = torch.empty_like(queries)
        for first in range(0, queries.shape[0], _QUERY_CHUNK):
            chunk = queries[first : first + _QUERY_CHUNK]
            start = computed + first
            rows = torch.arange(start, start + chunk.shape[0], device=queries.device).unsqueeze(1)
            low = max(0, start - spec.sliding_window + 1) if spec.sliding_window else 0
            high = start + chunk.shape[0]
            columns = torch.arange(low, high, device=queries.device).unsqueeze(0)
            visible = columns <= rows
            if spec.sliding_window:
                visible &= columns > rows - spec.sliding_window
            # [K, G * n, D]: the queries of a group share their keys, so they fold into one product.
            folded = self._grouped(chunk).permute(1, 2, 0, 3).flatten(1, 2).float()
            scores = torch.matmul(folded, keys[:, low:high].transpose(1, 2))
            weights = self._softmax(scores, visible.repeat(self._group, 1).unsqueeze(0))
            attended = torch.matmul(weights, values[:, low:high])
            attended = attended.view(spec.num_kv_heads, self._group, -1, spec.head_dim)
            out[first : first + _QUERY_CHUNK] = self._ungrouped(attended.permute(2, 0, 1, 3)).to(queries.dtype)
        return out

    def _read(self, cached: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        return unpack_rows(cached) if self._scaled else cached.float()

    def _grouped(self, queries: torch.Tensor) -> torch.Tensor:
        """[n, heads, D] -> [n, K, G, D]."""
        placed = queries if self._heads is None else queries[:, self._heads]
        return placed.reshape(-1, self._spec.num_kv_heads, self._group, self._spec.head_dim)

    def _ungrouped(self, out: torch.Tensor) -> torch.Tensor:
        """[n, K, G, D] -> [n, heads, D]."""
        flat = out.flatten(1, 2)
        return flat if self._places is None else flat[:, self._places]

    def _softmax(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        scores = scores * self._spec.scale
        if self._spec.soft_cap:
            scores = torch.tanh(scores / self._spec.soft_cap) * self._spec.soft_cap
        return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


def _rotate(heads: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Rotate the leading dimensions of [T, heads, D] by ``cos_sin`` [T, rotary_dim], in fp32."""
    half = rotary_dim // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = heads[..., :half].float(), heads[..., half:rotary_dim].float()
    parts = [
        (first * cos - second * sin).to(heads.dtype),
        (second * cos + first * sin).to(heads.dtype),
        heads[..., rotary_dim:],
    ]
    return torch.cat(parts, dim=-1)
