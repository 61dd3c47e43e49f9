"""The operators contract: the small arithmetic between linears and attention, and sampling over the vocabulary.

T is tokens, H hidden size, I intermediate size, V vocabulary size, R rows to sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Operators(Protocol):
    """Norms, activations and vocabulary-wide reductions on one device. All return new tensors unless said otherwise."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, weight_offset: float = 0.0
    ) -> torch.Tensor:
        """``x / rms(x) * (weight + weight_offset)`` over the last dim, computed in fp32, in the dtype of ``x``."""

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual + x`` [T, H], and its rms norm. Returns (normed, residual); both inputs may be overwritten."""

    def head_rms_norm(
        self,
        qkv: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        first_head: int,
        num_heads: int,
        head_dim: int,
        weight_offset: float = 0.0,
    ) -> None:
        """Normalise heads ``first_head`` onwards of the fused rows ``qkv`` [T, heads * head_dim], in place."""

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """``act(gate) * up``: [T, 2 I] (gate first) -> [T, I]; ``activation`` is silu, gelu or gelu_tanh."""

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """``x * factor`` in the dtype of ``x``; may be in place."""

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """``cap * tanh(logits / cap)`` for fp32 [R, V]; may be in place."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V] -> int64 [R]; the first of equal maxima."""

    def gumbel_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample one id a row: argmax of ``logits * inverse_temperature + gumbel`` over the finite entries.

        ``logits`` fp32 [R, V] (-inf: excluded), ``inverse_temperature`` fp32 [R] (0: no noise, the row's argmax),
        ``seeds`` int64 [R], ``positions`` int64 [R] -> int64 [R]. Noise of entry v is Philox4x32-10 with key (low, high
        32 bits of the seed) and counter (v // 4, position, 0, 0), word v % 4; u = (word + 0.5) / 2**32; gumbel =
        -log(-log(u)). So a draw depends on seed, position and vocabulary id alone (Salmon et al., "Parallel random
        numbers: as easy as 1, 2, 3", 2011).
        """

    def log_normalizer(self, logits: torch.Tensor) -> torch.Tensor:
        """log(sum(exp(logits))) a row: fp32 [R, V] -> fp32 [R]."""


@runtime_checkable
class Foresight(Protocol):
    """What operators also offer that prepare for a model's sizes; those without it are never told."""

    def expect(self, *, hidden_size: int, intermediate_size: int, activation: str) -> None:
        """Told once, while the model is built: the widths of its norms and of this rank's ``gated``.

        A hint: kernels may be compiled meanwhile, and other widths must work as well.
        """


@runtime_checkable
class CheckedDraws(Protocol):
    """What operators also offer that look for broken rows while they draw; those without it are never asked."""

    def draw(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``gumbel_argmax`` of logits that exclude nothing -> its ids, and the same with -1 for each row of which some
        logit is not finite; both int64 [R].
        """
