"""Skips the whole folder, with the reason, where the kernels cannot run; contexts that backends are built from."""

from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionSpec
from fourfold.entries import AttentionContext, ComputeContext
from fourfold_kernels_cpu.cpu_support import unsupported_reason


@pytest.fixture(scope="session")
def native():
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no CPU kernels here: {reason}")
    from fourfold_kernels_cpu.native import load

    return load()


@pytest.fixture
def compute_context(native):
    torch.manual_seed(0)
    return ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.bfloat16)


@pytest.fixture
def attention_context(native):
    torch.manual_seed(0)

    def make(**fields):
        return AttentionContext(
            config=EngineConfig(), device=torch.device("cpu"), dtype=torch.bfloat16, spec=AttentionSpec(**fields)
        )

    return make


@pytest.fixture
def thread_counts():
    """Thread counts to compare; torch's own is put back afterwards."""
    before = torch.get_num_threads()
    yield sorted({1, 2, 3, before})
    torch.set_num_threads(before)
