"""Run by test_interpreted: the linear method against core's torch twin."""

from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.testing.linear_method import LinearMethodConformance, assert_near
from fourfold_kernels_triton import gpu_support
from fourfold_kernels_triton.linear import TritonLinearMethod, outs_each


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_support, "unsupported_reason", lambda: None)


class TestConformance(LinearMethodConformance):
    name = "triton"


@pytest.mark.parametrize(("in_features", "out_features"), [(1024, 40), (2056, 3), (8, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_goes_through_the_kernel(monkeypatch, in_features, out_features, bias):
    method = TritonLinearMethod(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float16))
    weight = method.create(in_features, out_features, bias=bias, dtype=torch.float16)
    values, offsets = torch.randn(out_features, in_features).half(), torch.randn(out_features).half()
    method.load_shard(weight, values, first_row=0)
    if bias:
        method.load_bias(weight, offsets, first_row=0)
    x = torch.randn(1, in_features).half()
    expected = torch.nn.functional.linear(x.float(), values.float(), offsets.float() if bias else None)

    def refuse(*args: object) -> None:
        raise AssertionError("torch was asked for one row")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    assert_near(method.apply(weight, x), expected, "float16", torch.float16)
    torch.testing.assert_close(method.apply(weight, x, out_dtype=torch.float32), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("out_features", "outs"), [(151936, 8), (2112, 8), (1024, 2), (100, 1)])
def test_outputs_leave_no_multiprocessor_idle(out_features, outs):
    assert outs_each(out_features) == outs
