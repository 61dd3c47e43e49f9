"""The kernel that chooses experts compiles for sm_90, and one warp does it without a barrier."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.testing.expert_choosing import MIXTURES
from fourfold_kernels_triton import operators

sys.path.insert(0, str(Path(__file__).parent))
from compilation import Launches

META = torch.device("meta")


def test_it_compiles_for_every_kind_of_mixture(monkeypatch):
    noted = Launches()
    monkeypatch.setattr(operators, "launch", noted)
    monkeypatch.setattr(operators, "starts_early", lambda device: True)
    built = operators.TritonOperators(ComputeContext(config=EngineConfig(), device=META, dtype=torch.bfloat16))
    for mixture in MIXTURES:
        bias = torch.empty(mixture.num_experts, device=META) if mixture.score_bias else None
        built.choose_experts(torch.empty(3, mixture.num_experts, device=META), bias, mixture)
    compiled = noted.compile()
    assert len(compiled) == len(MIXTURES)
    for _, kernel in compiled:
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
        assert "bar.sync" not in kernel.asm["ptx"]
        assert "ld.local" not in kernel.asm["ptx"]
