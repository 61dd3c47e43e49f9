from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import CommunicatorContext
from fourfold.errors import Unsupported
from fourfold_comm_nccl.nccl import build
from fourfold_comm_nccl.plugin import fourfold_communicators


def test_it_suits_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = fourfold_communicators()
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cpu")
    assert entry.suits(EngineConfig()).score == 0
    assert "this host has none" in entry.suits(EngineConfig()).reason
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cuda")
    assert entry.suits(EngineConfig()).score == 100


def test_it_refuses_cpu_tensors() -> None:
    context = CommunicatorContext(group="tp", ranks=(0, 1), rank=0, device=torch.device("cpu"), store=None, timeout=1.0)
    with pytest.raises(Unsupported, match="not on cpu"):
        build(context)
