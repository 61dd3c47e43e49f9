"""Run by test_interpreted: experts against core's row by row."""

from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext, ExpertsContext
from fourfold.layers.torch_operators import TorchOperators
from fourfold.testing.experts import ExpertsConformance
from fourfold_kernels_triton import experts, gpu_support
from fourfold_kernels_triton.experts import ProductTile


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_support, "unsupported_reason", lambda: None)


class TestConformance(ExpertsConformance):
    name = "triton"
    dtypes = ("float32", "float16")
    activations = ("silu",)


class TestSmallTiles(TestConformance):
    """Tiles that do not divide the sizes, and pairs that are put in order in several pieces."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        tile = ProductTile(rows=16, outs=32, columns=32, warps=4, stages=2)
        monkeypatch.setattr(experts, "TILES", ((1e9, tile),))
        monkeypatch.setattr(experts, "_PAIRS", 32)


@pytest.mark.parametrize(("rows", "width"), [(3, 72), (7, 1032)])
def test_rows_are_brought_together(rows, width):
    device, config = torch.device("cpu"), EngineConfig()
    operators = TorchOperators(ComputeContext(config=config, device=device, dtype=torch.float32))
    built = experts.TritonExperts(
        ExpertsContext(
            config=config,
            device=device,
            dtype=torch.float32,
            num_experts=2,
            hidden_size=width,
            intermediate_size=8,
            activation="silu",
            operators=operators,
        )
    )
    x, pairs = torch.randn(rows, width), torch.randperm(2 * rows)
    assert torch.equal(built._gather(x, pairs, 2), x[pairs // 2])
