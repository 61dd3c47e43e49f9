"""The attention backend ``triton``: head norms, rotary, cache write and paged attention.

A decode step is one kernel; a step with prompts is one for the cache, one for prompts, and one for decodes if there are
any. Lengths, tables, slots and positions are read on the device when the kernels run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.errors import Unsupported
from fourfold.layers.scaled_rows import SCALE_BYTES
from fourfold_kernels_triton.compile_ahead import compile_instead
from fourfold_kernels_triton.counters import Counters
from fourfold_kernels_triton.kernels.cache_write import write_cache
from fourfold_kernels_triton.kernels.decode import attend_decodes
from fourfold_kernels_triton.kernels.prefill import attend_prompts
from fourfold_kernels_triton.kernels.shape import Shape
from fourfold_kernels_triton.launch import launch, starts_early
from fourfold_kernels_triton.tiles import decode_tile, multiprocessors, prefill_tile, split_context

if TYPE_CHECKING:
    from fourfold.entries import AttentionContext

MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 64
_SMALLEST_PRODUCT: Final = 16
"""Rows and columns that a matrix product of Triton has at least."""
_TOKENS_WRITTEN: Final = 16
"""Tokens whose keys and values one program writes."""


_LONG: Final = 4096
"""A context that is cut over programs; kernels are compiled ahead for such."""


class _Step(NamedTuple):
    """What the kernels of one call read and write."""

    qkv: torch.Tensor
    out: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    shape: Shape
    kv_cache: torch.Tensor
    scales: torch.Tensor
    """The cache as fp32, in which the scales of an fp8 cache lie."""
    metadata: AttentionMetadata


class TritonAttention:
    """One layer's attention. See the contract for each method."""

    def __init__(self, context: AttentionContext) -> None:
        spec = context.spec
        groups = spec.groups
        if not 0 < spec.head_dim <= MAX_HEAD_DIM:
            raise Unsupported(f"triton attention takes heads of up to {MAX_HEAD_DIM}, not {spec.head_dim}")
        if max(groups) > MAX_GROUP:
            raise Unsupported(
                f"triton attention shares a kv head among up to {MAX_GROUP} query heads, not {max(groups)}"
            )
        if spec.rotary_dim % 2 or not 0 <= spec.rotary_dim <= spec.head_dim:
            raise Unsupported(f"a head of {spec.head_dim} cannot rotate {spec.rotary_dim} dimensions")
        self._spec = spec
        self._width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self._group = _power_of_two(max(groups))
        self._group_size = groups[0] if len(set(groups)) == 1 else 0
        self._scaled = context.cache_dtype is torch.float8_e4m3fn
        if self._scaled and context.device.type == "cuda" and torch.cuda.get_device_capability(context.device) < (8, 9):
            raise Unsupported("an fp8 cache needs a device of compute capability 8.9 or more; --kv-cache-dtype auto")
        self._padded_dim = max(_power_of_two(spec.head_dim), _SMALLEST_PRODUCT)
        self._first_head = torch.tensor(
            [sum(groups[:index]) for index in range(len(groups) + 1)], dtype=torch.int32, device=context.device
        )
        self._counters = Counters(context.device)
        self._early = starts_early(context.device)
        self._launch: Callable[..., None] = launch
        self._multiprocessors = multiprocessors(context.device)
        self._query_weight, self._key_weight = self._first_head, self._first_head  # not read without norms
        self._epsilon = self._weight_offset = 0.0
        wide = context.dtype is torch.float32
        self._decode_tile = decode_tile(self._padded_dim, wide=wide, scaled=self._scaled)
        self._prefill_tile = prefill_tile(self._padded_dim, wide=wide)
        self._shape = Shape(
            norm=False,
            rotary=spec.rotary_dim,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            group=self._group,
            head_dim=spec.head_dim,
            padded_dim=self._padded_dim,
            block_size=context.config.cache.block_size,
            scaled=self._scaled,
            soft_cap=spec.soft_cap > 0,
            window=spec.sliding_window,
            precision="ieee" if wide else "tf32",
        )
        self._context = context
        if not spec.head_norms:
            self._compile()

    def norm_heads(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, epsilon: float, *, weight_offset: float = 0.0
    ) -> None:
        """See ``HeadNorming``; the weights are read at each step."""
        self._query_weight, self._key_weight = query_weight, key_weight
        self._epsilon, self._weight_offset = epsilon, weight_offset
        self._shape = replace(self._shape, norm=True)
        self._compile()

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[blocks, kv heads, keys and values, block_size, head_dim]: one head of a block is read in one piece.

        Scales add to head_dim; they lie together at a piece's end.
        """
        width = self._spec.head_dim + (SCALE_BYTES if self._scaled else 0)
        return (num_blocks, self._spec.num_kv_heads, 2, block_size, width)

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See the contract; ``qkv`` is left as it is."""
        if qkv.shape[1] != self._width or qkv.stride(1) != 1:
            raise Unsupported(f"qkv is dense rows of {self._width}, not {tuple(qkv.shape)} of strides {qkv.stride()}")
        out = torch.empty(
            (qkv.shape[0], self._spec.num_heads * self._spec.head_dim), dtype=qkv.dtype, device=qkv.device
        )
        step = _Step(
            qkv=qkv,
            out=out,
            positions=positions,
            cos_sin=self._first_head if cos_sin is None else cos_sin,  # a pointer that nothing follows without rotary
            shape=self._shape if cos_sin is not None else replace(self._shape, rotary=0),
            kv_cache=kv_cache,
            scales=kv_cache.view(torch.uint8).flatten().view(torch.float32) if self._scaled else kv_cache,
            metadata=metadata,
        )
        if metadata.max_query_length > 1:
            self._write(step)
            self._attend_prompts(step)
        if metadata.max_query_length == 1 or _has_decodes(metadata.query_start_list):
            self._attend_decodes(step)
        return out

    def _compile(self) -> None:
        """Start compiling what a decode step and one with a prompt need, from tensors without content."""
        context, spec = self._context, self._spec
        if context.device.type != "cuda":
            return
        twin = copy.copy(self)
        twin._launch = compile_instead(context.device)
        empty = functools.partial(torch.empty, device="meta")
        cache = empty(self.kv_cache_shape(1, context.config.cache.block_size), dtype=context.cache_dtype)
        cos_sin = empty((1, spec.rotary_dim), dtype=torch.float32) if spec.rotary_dim else None
        for starts in ([0, 1], [0, 1, 3]):
            tokens, sequences = starts[-1], len(starts) - 1
            metadata = AttentionMetadata(
                query_start=empty(sequences + 1, dtype=torch.int32),
                sequence_lengths=empty(sequences, dtype=torch.int32),
                block_table=empty((sequences, _LONG), dtype=torch.int32),
                slot_mapping=empty(tokens, dtype=torch.int64),
                max_query_length=tokens - sequences + 1,
                max_sequence_length=_LONG,
                query_start_list=starts,
                sequence_lengths_list=[_LONG] * sequences,
            )
            qkv = empty((tokens, self._width), dtype=context.dtype)
            twin.rotate_and_attend(qkv, empty(tokens, dtype=torch.int64), cos_sin, cache, metadata)

    def _write(self, step: _Step) -> None:
        tokens = step.qkv.shape[0]
        self._launch(
            write_cache,
            (-(-tokens // _TOKENS_WRITTEN), self._spec.num_kv_heads),
            step.qkv,
            step.kv_cache,
            step.scales,
            step.metadata.slot_mapping,
            step.positions,
            step.cos_sin,
            self._key_weight,
            step.qkv.stride(0),
            tokens,
            self._epsilon,
            self._weight_offset,
            SHAPE=step.shape,
            TOKENS=_TOKENS_WRITTEN,
        )

    def _attend_prompts(self, step: _Step) -> None:
        metadata = step.metadata
        num_sequences = len(metadata.sequence_lengths_list)
        tile = self._prefill_tile
        tokens = max(tile.rows // self._group, 1)
        self._launch(
            attend_prompts,
            (step.qkv.shape[0] // tokens + num_sequences, self._spec.num_kv_heads),
            step.qkv,
            step.out,
            step.kv_cache,
            step.scales,
            metadata.query_start,
            metadata.sequence_lengths,
            metadata.block_table,
            step.positions,
            step.cos_sin,
            self._first_head,
            self._query_weight,
            step.qkv.stride(0),
            metadata.block_table.stride(0),
            num_sequences,
            self._spec.scale,
            self._spec.soft_cap,
            self._epsilon,
            self._weight_offset,
            SHAPE=step.shape,
            TOKENS=tokens,
            TILE=tile.tokens,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _attend_decodes(self, step: _Step) -> None:
        metadata = step.metadata
        num_sequences = len(metadata.sequence_lengths_list)
        pairs = num_sequences * self._spec.num_kv_heads
        tile = self._decode_tile
        longest = min(metadata.max_sequence_length, self._spec.sliding_window or metadata.max_sequence_length)
        split = split_context(pairs, longest, tile.tokens, self._multiprocessors)
        sums = stats = step.out
        if split.most > 1:
            kept = pairs * split.most * self._group
            sums = torch.empty(kept * self._padded_dim, dtype=torch.float32, device=step.qkv.device)
            stats = torch.empty(kept * 2, dtype=torch.float32, device=step.qkv.device)
        self._launch(
            attend_decodes,
            (self._spec.num_kv_heads, num_sequences, split.most),
            step.qkv,
            step.out,
            step.kv_cache,
            step.scales,
            sums,
            stats,
            self._counters.at_least(pairs),
            metadata.query_start,
            metadata.sequence_lengths,
            metadata.block_table,
            metadata.slot_mapping,
            step.positions,
            step.cos_sin,
            self._first_head,
            self._query_weight,
            self._key_weight,
            step.qkv.stride(0),
            metadata.block_table.stride(0),
            split.most,
            split.min_tiles,
            self._spec.scale,
            self._spec.soft_cap,
            self._epsilon,
            self._weight_offset,
            SHAPE=step.shape,
            ROWS=max(self._group, _SMALLEST_PRODUCT),
            TILE=tile.tokens,
            SPLIT=split.most > 1,
            ALL=metadata.max_query_length == 1 and step.qkv.shape[0] == num_sequences,
            GROUP_SIZE=self._group_size,
            EARLY=self._early,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _has_decodes(query_start: Sequence[int]) -> bool:
    """Whether some sequence has one new token."""
    return any(stop - start == 1 for start, stop in pairwise(query_start))


def _power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()
