"""What the runner needs of a model; ``fourfold.models.decoder.Decoder`` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fourfold.worker.layer_caches import CachedModel

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.contracts.operators import Operators


class Model(CachedModel, Protocol):
    """What the runner needs of a decoder; T tokens, R rows, H hidden size, V vocabulary size."""

    @property
    def operators(self) -> Operators:
        """Those of its own norms; they sample too."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """int64 [T], int64 [T], a cache and metadata a layer -> [T, H]."""

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> this rank's part of the logits, fp32; the ranks do not talk meanwhile."""

    def collect_logits(self, local: torch.Tensor) -> torch.Tensor:
        """What all ranks' ``local_logits`` gave -> fp32 [R, V] on the first rank that shares the layers."""

    def best_tokens(self, local: torch.Tensor, broken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``local_logits`` and bool [R] where they are not finite -> int64 [R] and bool [R] for all ranks, on all."""
