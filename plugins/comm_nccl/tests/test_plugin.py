from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import AllToAllContext, CommunicatorContext
from fourfold.errors import Unsupported
from fourfold_comm_nccl.nccl import build
from fourfold_comm_nccl.plugin import fourfold_all_to_alls, fourfold_communicators


@pytest.mark.parametrize("offer", [fourfold_communicators, fourfold_all_to_alls], ids=["nccl", "peer"])
def test_it_suits_cuda_only(monkeypatch: pytest.MonkeyPatch, offer: Callable[[], list[Any]]) -> None:
    (entry,) = offer()
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cpu")
    assert entry.suits(EngineConfig()).score == 0
    assert "this host has none" in entry.suits(EngineConfig()).reason
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cuda")
    assert entry.suits(EngineConfig()).score == 100


def test_it_refuses_cpu_tensors() -> None:
    context = CommunicatorContext(group="tp", ranks=(0, 1), rank=0, device=torch.device("cpu"), store=None, timeout=1.0)
    with pytest.raises(Unsupported, match="not on cpu"):
        build(context)


def test_peer_refuses_what_is_on_a_cpu() -> None:
    context = AllToAllContext(
        config=EngineConfig(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        communicator=None,  # type: ignore[arg-type]
        hidden_size=48,
        top_k=1,
        num_experts=2,
        owners=torch.tensor([0, 1], dtype=torch.int32),
        max_tokens=4,
    )
    with pytest.raises(Unsupported, match="between cuda devices, not 192 bytes on cpu"):
        fourfold_all_to_alls()[0].build(context)
