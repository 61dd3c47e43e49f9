"""One decoder layer: attention, then feed-forward. Straight calls only; knows no family, rank or backend by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fourfold.contracts.attention_backend import HeadNorming

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.attention_backend import AttentionBackend, AttentionMetadata
    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import ParallelLayer
    from fourfold.models.norm_weight import NormWeight
    from fourfold.models.summing_norm import AddNorm, SummingNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorm:
    """A norm over neighbouring heads of the fused query, key and value rows."""

    weight: NormWeight
    first_head: int
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """What one layer is made of; norms that a family does not have are None or empty."""

    qkv: ParallelLayer
    output: Callable[[torch.Tensor], torch.Tensor]
    """What attention gave -> [T, H], whole on every rank."""
    feed_forward: Callable[[torch.Tensor], torch.Tensor]
    """[T, H] -> [T, H], whole on every rank."""
    attention: AttentionBackend
    cos_sin: torch.Tensor | None
    head_norms: tuple[HeadNorm, HeadNorm] | tuple[()]
    """Of the queries and of the keys."""
    row_steps: tuple[Callable[[torch.Tensor], object], ...] = ()
    """What else happens to the fused rows, in place, before they rotate."""
    head_dim: int
    input_norm: NormWeight
    """Applied by the decoder, together with the residual of the layer before."""
    attention_output_norm: NormWeight | None
    feed_forward_norm: NormWeight
    feed_forward_output_norm: NormWeight | None
    summing_norm: SummingNorm | None = None
    """Takes the sum over ranks that ``output`` leaves; None: it leaves none."""
    leaves_sum: bool = False
    """Whether ``feed_forward`` leaves one, which the norm after the layer has to take."""


class DecoderLayer:
    """T tokens through one layer. All tensors are [T, H] unless said otherwise."""

    def __init__(self, parts: LayerParts, operators: Operators, *, epsilon: float, weight_offset: float) -> None:
        self.parts = parts
        self._qkv = parts.qkv
        self._attend = parts.attention.rotate_and_attend
        self._cos_sin = parts.cos_sin
        self._output = parts.output
        self._feed_forward = parts.feed_forward
        norms = _head_norms(parts, operators, epsilon=epsilon, weight_offset=weight_offset)
        self._row_steps = (*norms, *parts.row_steps)
        norm = partial(operators.rms_norm, epsilon=epsilon, weight_offset=weight_offset)
        self._attention_output_norm = _bind(norm, parts.attention_output_norm)
        self._feed_forward_output_norm = _bind(norm, parts.feed_forward_output_norm)
        self._add_norm: AddNorm = partial(
            operators.add_rms_norm,
            weight=parts.feed_forward_norm.tensor,
            epsilon=epsilon,
            weight_offset=weight_offset,
        )
        if parts.summing_norm is not None:
            self._add_norm = parts.summing_norm(parts.feed_forward_norm.tensor)

    def __call__(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``normed`` is the norm of ``residual``. Returns (what is still to be added to the residual, the residual)."""
        qkv = self._qkv(normed)
        for step in self._row_steps:
            step(qkv)
        x = self._output(self._attend(qkv, positions, self._cos_sin, kv_cache, metadata))
        if self._attention_output_norm is not None:
            x = self._attention_output_norm(x)
        normed, residual = self._add_norm(x, residual)
        x = self._feed_forward(normed)
        if self._feed_forward_output_norm is not None:
            x = self._feed_forward_output_norm(x)
        return x, residual


def _head_norms(
    parts: LayerParts, operators: Operators, *, epsilon: float, weight_offset: float
) -> list[Callable[[torch.Tensor], None]]:
    """Norms in place on the fused rows; none where the attention backend takes them over."""
    if parts.head_norms and isinstance(parts.attention, HeadNorming):
        queries, keys = parts.head_norms
        parts.attention.norm_heads(queries.weight.tensor, keys.weight.tensor, epsilon, weight_offset=weight_offset)
        return []
    return [
        partial(
            operators.head_rms_norm,
            weight=norm.weight.tensor,
            epsilon=epsilon,
            first_head=norm.first_head,
            num_heads=norm.num_heads,
            head_dim=parts.head_dim,
            weight_offset=weight_offset,
        )
        for norm in parts.head_norms
    ]


def _bind(
    norm: Callable[..., torch.Tensor], weight: NormWeight | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return None if weight is None else partial(norm, weight=weight.tensor)
