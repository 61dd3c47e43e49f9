from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.layers import torch_linear
from fourfold.layers.torch_linear import TorchLinearMethod


@pytest.fixture
def method() -> TorchLinearMethod:
    return TorchLinearMethod(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.bfloat16))


def test_wide_results_are_not_rounded_on_the_way(method: TorchLinearMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linear, "_WIDENED_ELEMENTS", 200)  # several chunks, the last one short
    dense, bias, x = torch.randn(37, 24).bfloat16(), torch.randn(37).bfloat16(), torch.randn(3, 24).bfloat16()
    weight = method.create(24, 37, bias=True, dtype=torch.bfloat16)
    method.load_shard(weight, dense.float(), first_row=0)
    method.load_bias(weight, bias, first_row=0)
    out = method.apply(weight, x, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ dense.float().T + bias.float())
    assert method.apply(weight, x).dtype == torch.bfloat16


def test_bias_of_a_weight_without_one(method: TorchLinearMethod) -> None:
    weight = method.create(4, 4, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="created without a bias"):
        method.load_bias(weight, torch.zeros(4), first_row=0)


def test_a_weight_of_another_method(method: TorchLinearMethod) -> None:
    with pytest.raises(TypeError, match="a weight of object, which it did not create"):
        method.apply(object(), torch.zeros(1, 4))  # type: ignore[arg-type]
