"""The kit finds experts that compute rightly and are wrong all the same."""

from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.contracts.mixture import ExpertPart
from fourfold.layers.loop_experts import LoopExperts
from fourfold.testing.experts import ExpertsConformance


class Kit(ExpertsConformance):
    name = "loop"
    __test__ = False


class Swapping(LoopExperts):
    """Reads one matrix for another."""

    def load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        super().matrix(expert, part).copy_(tensor)

    def matrix(self, expert: int, part: ExpertPart) -> torch.Tensor:
        return super().matrix(expert, "up" if part == "gate" else part)


class Careless(LoopExperts):
    """Uses its input's memory for something else."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = super().__call__(x, ids, weights)
        x.fill_(1.0)
        return out


class Mixing(LoopExperts):
    """Multiplies rows by 0 in place of leaving them out."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        whole = super().__call__(x, ids, weights)
        finite = whole.masked_fill((ids < 0).all(1, keepdim=True), 0.0)
        return whole + 0.0 * finite.sum(0)


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (Swapping, "test_a_matrix_is_what_was_loaded"),
        (Swapping, "test_an_expert_may_move_to_another_slot"),
        (Careless, "test_one_expert_takes_all_rows"),
        (Mixing, "test_a_row_of_nan_spoils_no_other"),
    ],
)
def test_what_is_wrong_is_caught(wrong: type[LoopExperts], test: str) -> None:
    torch.manual_seed(0)
    kit = Kit()
    for kind in (LoopExperts, wrong):
        experts = kind(kit.context(EngineConfig(model=ModelConfig(dtype="float32")), "silu"))
        built = [("float32", "silu", experts, kit.fill(experts, "float32"))]
        if kind is LoopExperts:
            getattr(kit, test)(built)
        else:
            with pytest.raises(AssertionError):
                getattr(kit, test)(built)
