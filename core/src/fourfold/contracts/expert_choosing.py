"""What operators may also offer: to choose the experts of tokens. T is tokens, E experts, K experts a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from fourfold.models.description import MixtureDescription


@runtime_checkable
class ExpertChoosing(Protocol):
    """Operators without it are never asked; torch chooses then."""

    def choose_experts(
        self, logits: torch.Tensor, bias: torch.Tensor | None, mixture: MixtureDescription
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``fourfold.layers.router.Router``: fp32 [T, E], fp32 [E] -> ids int32 [T, K], weights fp32 [T, K].

        Among equal scores any may be chosen, none twice.
        """
