"""What operators that choose experts must do: as core's router. A test sets ``name``."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype, ModelConfig
from fourfold.contracts.expert_choosing import ExpertChoosing
from fourfold.layers.router import Router
from fourfold.models.description import MixtureDescription
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance
from fourfold.testing.linear_method import compute_context

MIXTURES = (
    MixtureDescription(num_experts=128, top_k=8, intermediate_size=1, normalize=True),
    MixtureDescription(num_experts=60, top_k=4, intermediate_size=1),
    MixtureDescription(num_experts=8, top_k=1, intermediate_size=1, scale=1.5),
    MixtureDescription(num_experts=5, top_k=5, intermediate_size=1),
    MixtureDescription(num_experts=15, top_k=3, intermediate_size=1, num_groups=5, top_groups=2, scale=16.0),
    MixtureDescription(
        num_experts=256,
        top_k=8,
        intermediate_size=1,
        scoring="sigmoid",
        normalize=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        group_score="top2_sum",
        score_bias=True,
    ),
)


class ExpertChoosingConformance(Conformance):
    """The contract, against ``Router``."""

    name: ClassVar[str]
    """Of the operators."""
    dtype: ClassVar[Dtype] = "bfloat16"
    """Of the activations, which the choice does not depend on."""
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def operators(self) -> ExpertChoosing:
        """The operators; skips, with their reason, where they cannot run."""
        torch.manual_seed(0)
        entry = load_plugins().operators()[self.name]
        config = EngineConfig(model=ModelConfig(dtype=self.dtype))
        suits = entry.suits(config)
        if suits.score <= 0:
            pytest.skip(f"{self.name} cannot run here: {suits.reason}")
        built = entry.build(compute_context(config, self.device))
        assert isinstance(built, ExpertChoosing)
        return built

    @pytest.mark.parametrize("rows", [0, 1, 17])
    def test_it_chooses_as_the_router(self, operators: ExpertChoosing, rows: int) -> None:
        for mixture in MIXTURES:
            bias = torch.randn(mixture.num_experts, device=self.device) if mixture.score_bias else None
            logits = 2 * torch.randn(rows, mixture.num_experts, device=self.device)
            ids, weights = operators.choose_experts(logits.clone(), bias, mixture)
            assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
            expected, factors = Router(mixture)(logits, bias)
            found, order = ids.sort(dim=1)
            wanted, twin_order = expected.sort(dim=1)
            assert torch.equal(found, wanted)
            torch.testing.assert_close(weights.gather(1, order), factors.gather(1, twin_order), rtol=1e-5, atol=1e-7)
