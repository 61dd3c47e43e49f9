"""What the entries claim, without a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold_kernels_triton import gpu_support, plugin


def entries():
    return [
        *plugin.fourfold_linear_methods(),
        *plugin.fourfold_attention_backends(),
        *plugin.fourfold_experts(),
        *plugin.fourfold_operators(),
    ]


def test_offers_four_entries():
    assert [entry.name for entry in entries()] == ["triton"] * 4


def test_importing_the_plugin_imports_neither_torch_nor_triton():
    code = "import sys, fourfold_kernels_triton.plugin; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_suits_a_cuda_device(monkeypatch):
    monkeypatch.setattr(gpu_support, "accelerator", lambda: "cuda")
    assert [entry.suits(EngineConfig()).score for entry in entries()] == [50] * 4


@pytest.mark.parametrize(
    ("device", "spec", "reason"),
    [("cpu", object(), "runs on a cuda device, and this host has none"), ("cuda", None, "pip install triton")],
)
def test_steps_back_with_a_reason(monkeypatch, device, spec, reason):
    monkeypatch.setattr(gpu_support, "accelerator", lambda: device)
    monkeypatch.setattr(gpu_support, "find_spec", lambda name: spec)
    for entry in entries():
        suits = entry.suits(EngineConfig())
        assert suits.score == 0
        assert reason in suits.reason
