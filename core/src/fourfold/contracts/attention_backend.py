"""The attention contract: a paged KV cache in the backend's own layout, and attention over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fourfold.errors import Unsupported

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """What one attention layer asks of its backend; head counts are this rank's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores before the softmax."""
    sliding_window: int = 0
    """A token sees itself and the ``sliding_window - 1`` before it; 0 is no window."""
    soft_cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0 is none."""
    rotary_dim: int = 0
    """Leading dimensions of a head that rotate; 0 is none."""
    group_sizes: tuple[int, ...] = ()
    """Query heads of each kv head, in order, where they differ: a rank that holds 5 of 9 heads over 3 kv heads has
    (3, 2). Empty: all kv heads serve equally many."""
    head_norms: bool = False
    """A hint: ``HeadNorming.norm_heads`` is going to be called, so that nothing need be prepared before."""

    shared_values: bool = False
    """Whether the value of each kv head is its key, rotated part and all: rows are queries and keys, and the cache
    holds them once. Only entries with the capability ``latent_cache`` are asked for it."""

    @property
    def row_width(self) -> int:
        """Of queries, keys and values together."""
        return (self.num_heads + (1 if self.shared_values else 2) * self.num_kv_heads) * self.head_dim

    @property
    def groups(self) -> tuple[int, ...]:
        """Query heads of each kv head, in order; raises Unsupported for sizes that do not fit together."""
        sizes = self.group_sizes or (self.num_heads // self.num_kv_heads,) * self.num_kv_heads
        if len(sizes) != self.num_kv_heads or sum(sizes) != self.num_heads or min(sizes) < 1:
            raise Unsupported(
                f"{self.num_kv_heads} kv heads cannot serve {self.num_heads} query heads as {list(sizes)}; "
                "group_sizes tells how many each one serves"
            )
        return sizes


@dataclass(kw_only=True, slots=True)
class AttentionMetadata:
    """Describes the T tokens of one step, S sequences one after another, for one KV-cache group.

    All tensors live on the device; their storage may be reused by the next step.
    """

    query_start: torch.Tensor
    """int32 [S + 1]: sequence s owns tokens query_start[s] to query_start[s + 1] - 1."""
    sequence_lengths: torch.Tensor
    """int32 [S]: tokens in the cache after this step, computed ones and these."""
    block_table: torch.Tensor
    """int32 [S, max_blocks]: cache blocks of each sequence in order; the entries past its length are undefined."""
    slot_mapping: torch.Tensor
    """int64 [T]: block * block_size + offset where each token's key and value go; -1 writes nothing."""
    max_query_length: int
    max_sequence_length: int
    query_start_list: list[int]
    """``query_start`` on the host."""
    sequence_lengths_list: list[int]
    """``sequence_lengths`` on the host."""


class AttentionBackend(Protocol):
    """One attention layer's arithmetic. Built once a layer; the cache tensor is handed in at each call.

    An entry with the capability ``fp8_cache`` is also built for a cache of bytes (``AttentionContext.cache_dtype``): it
    keeps keys and values in e4m3, each token and head with a scale of its own, for which the shape has room.
    One with ``latent_cache`` takes ``AttentionSpec.shared_values``, and a model of latent attention has its latents
    cached. One with ``latent_heads`` wants whole heads of such a model; one with neither gets it only by name.
    """

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor, keys and values together, in the context's ``cache_dtype``."""

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to the cache, attend.

        ``qkv`` [T, (num_heads + 2 * num_kv_heads) * head_dim] (once num_kv_heads where values are shared), may be
        overwritten; ``positions`` int64 [T];
        ``cos_sin`` fp32 [max_position, rotary_dim]: cosines, then sines, each rotary_dim / 2 (rotate-half
        convention), None for no rotation; ``kv_cache`` of ``kv_cache_shape``. Returns [T, num_heads * head_dim].
        """


@runtime_checkable
class HeadNorming(Protocol):
    """What an attention backend also offers that normalises heads on the way; one without it is never asked."""

    def norm_heads(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, epsilon: float, *, weight_offset: float = 0.0
    ) -> None:
        """From now on, take the rms norm of each query and key head before it is rotated.

        As ``Operators.head_rms_norm`` would; weights [head_dim], whose values may still change.
        """
