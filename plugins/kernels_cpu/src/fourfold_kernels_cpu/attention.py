"""The attention backend ``avx512``: rotary, cache write and paged attention over a cache of 16-token sub-blocks.

A row's result depends on its own sequence alone: not on the batch, the threads, or how its prompt was cut in chunks.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from fourfold.errors import Unsupported
from fourfold_kernels_cpu.native import load

if TYPE_CHECKING:
    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.entries import AttentionContext

SUB_BLOCK: Final = 16
MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 64
_ROPE: Final = struct.Struct("<14q")
_ATTENTION: Final = struct.Struct("<15qdqd")


class Avx512Attention:
    """One layer's attention. See the contract for each method."""

    def __init__(self, context: AttentionContext) -> None:
        spec = context.spec
        if context.dtype is not torch.bfloat16:
            raise Unsupported(f"avx512 attention computes in bfloat16, not {context.dtype}; use --attention torch")
        if spec.head_dim % 16 or not 0 < spec.head_dim <= MAX_HEAD_DIM:
            raise Unsupported(
                f"avx512 attention takes heads of a multiple of 16 up to {MAX_HEAD_DIM}, not {spec.head_dim}; "
                "use --attention torch"
            )
        groups = spec.groups
        if max(groups) > MAX_GROUP:
            raise Unsupported(
                f"avx512 attention shares a kv head among up to {MAX_GROUP} query heads, not {max(groups)}; "
                "use --attention torch"
            )
        if spec.rotary_dim % 2 or not 0 <= spec.rotary_dim <= spec.head_dim:
            raise Unsupported(f"a head of {spec.head_dim} cannot rotate {spec.rotary_dim} dimensions")
        self._spec = spec
        self._first_head = torch.tensor([sum(groups[:index]) for index in range(len(groups) + 1)], dtype=torch.int32)
        self._widest = max(groups)
        self._native = load()
        self._width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[blocks, kv heads, K and V, block_size * head_dim]; inside, sub-blocks of 16 tokens in pairs."""
        if block_size % SUB_BLOCK:
            raise Unsupported(f"avx512 attention needs blocks of a multiple of {SUB_BLOCK} tokens, not {block_size}")
        return (num_blocks, self._spec.num_kv_heads, 2, block_size * self._spec.head_dim)

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Two kernels: rotate and write, then attend."""
        self.rotate_and_write(qkv, positions, cos_sin, kv_cache, metadata.slot_mapping)
        return self.attend(qkv, kv_cache, metadata)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> None:
        """Rotate queries and keys in place and write keys and values; no slot mapping: only rotate."""
        spec = self._spec
        if qkv.dtype is not torch.bfloat16 or qkv.shape[1] != self._width or qkv.stride(1) != 1:
            raise Unsupported(f"qkv is bfloat16 rows of {self._width}, not {qkv.dtype} of shape {tuple(qkv.shape)}")
        rotary_dim = 0 if cos_sin is None else spec.rotary_dim
        table = 0 if cos_sin is None else cos_sin.data_ptr()
        slots = _ROPE.pack(
            qkv.data_ptr(),
            qkv.stride(0),
            qkv.shape[0],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            rotary_dim,
            table,
            table + rotary_dim * 2,  # the sines follow rotary_dim / 2 cosines of 4 bytes
            0 if cos_sin is None else cos_sin.stride(0),
            positions.data_ptr(),
            kv_cache.data_ptr(),
            kv_cache.shape[3] // spec.head_dim,
            0 if slot_mapping is None else slot_mapping.data_ptr(),
        )
        self._native.call("rope_and_cache", slots, qkv, positions, cos_sin, kv_cache, slot_mapping)

    def attend(self, qkv: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Attend with the queries at the front of each row of ``qkv``; lengths are read when the kernel runs."""
        spec = self._spec
        width = spec.num_heads * spec.head_dim
        out = self._native.empty((qkv.shape[0], width), torch.bfloat16)
        slots = _ATTENTION.pack(
            qkv.data_ptr(),
            qkv.stride(0),
            kv_cache.data_ptr(),
            kv_cache.shape[3] // spec.head_dim,
            spec.num_kv_heads,
            spec.head_dim,
            out.data_ptr(),
            width,
            metadata.query_start.data_ptr(),
            metadata.sequence_lengths.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.block_table.stride(0),
            metadata.sequence_lengths.shape[0],
            self._first_head.data_ptr(),
            self._widest,
            spec.scale,
            spec.sliding_window,
            spec.soft_cap,
        )
        self._native.call(
            "attention",
            slots,
            qkv,
            kv_cache,
            out,
            metadata.query_start,
            metadata.sequence_lengths,
            metadata.block_table,
            self._first_head,
        )
        return out
