"""Which experts a token goes to, and with what weights: the choice in plain torch, and the layer that asks for it.

T is tokens, H hidden size, E experts, K experts a token. Knows neither ranks nor where experts are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from fourfold.contracts.expert_choosing import ExpertChoosing
from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.entries import ParallelLayerContext
    from fourfold.models.description import MixtureDescription

LEAST_SUM = 1e-20
"""Added before a division by the sum of sigmoids, which may all have underflowed to 0 (as DeepSeek-V3's own code)."""


class Router:
    """Chooses from logits.

    ``softmax``: Fedus et al., "Switch Transformers" (2021), with K as in "Mixtral of Experts" (Jiang et al., 2024);
    ``sigmoid`` and its bias, which moves the choice and not the weights: "DeepSeek-V3 Technical Report" (2024), section
    2.1.2; groups: "DeepSeek-V2" (2024), section 2.2.2, by the best expert of a group or by its best two together.
    """

    def __init__(self, mixture: MixtureDescription) -> None:
        self._mixture = mixture

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits`` fp32 [T, E], ``bias`` fp32 [E] -> (ids int32 [T, K], each once a row; weights fp32 [T, K])."""
        mixture = self._mixture
        scores = logits.sigmoid() if mixture.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if bias is None else scores + bias
        if mixture.num_groups > 1:
            choice = choice.masked_fill(~self._in_best_groups(choice), -torch.inf)
        ids = choice.topk(mixture.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if mixture.normalize:
            least = LEAST_SUM if mixture.scoring == "sigmoid" else 0.0
            weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
        if mixture.scale != 1.0:
            weights = weights * mixture.scale
        return ids.to(torch.int32), weights

    def _in_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """bool [T, E]."""
        mixture = self._mixture
        grouped = choice.view(-1, mixture.num_groups, mixture.num_experts // mixture.num_groups)
        if mixture.group_score == "top2_sum":
            group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        else:
            group_scores = grouped.amax(dim=-1)
        best = torch.zeros_like(group_scores, dtype=torch.bool)
        best.scatter_(1, group_scores.topk(mixture.top_groups, dim=-1).indices, True)
        return best.unsqueeze(-1).expand_as(grouped).flatten(1)


class RouterGate:
    """The router with its weight, whole on every rank. Parameters are ``weight`` and, with a score bias, ``bias``."""

    def __init__(self, context: ParallelLayerContext, mixture: MixtureDescription) -> None:
        self._method = context.linear_method
        operators = context.operators
        self._choose: Callable[..., tuple[torch.Tensor, torch.Tensor]] = Router(mixture)
        if isinstance(operators, ExpertChoosing):
            self._choose = partial(operators.choose_experts, mixture=mixture)
        self._weight = context.linear_method.create(
            context.in_features, mixture.num_experts, bias=False, dtype=context.dtype
        )
        self._bias: torch.Tensor | None = None
        if mixture.score_bias:
            self._bias = torch.empty(mixture.num_experts, dtype=torch.float32, device=context.device)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take the whole tensor."""
        if parameter == "weight":
            self._method.load_shard(self._weight, tensor[:], first_row=0)
        elif self._bias is not None:
            self._bias.copy_(tensor[:])
        else:
            raise ConfigError("this router was built without a score bias")

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> see ``Router``. Logits are fp32, since their order decides."""
        return self._choose(self._method.apply(self._weight, x, out_dtype=torch.float32), self._bias)
