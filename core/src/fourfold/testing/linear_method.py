"""What every linear method must do: agree with core's torch twin. A test sets ``name`` and, if need be, ``dtypes``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype, ModelConfig
from fourfold.contracts.linear_method import LinearMethod, LinearWeight, ReleasableWeights
from fourfold.entries import ComputeContext
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance

SIZES = ((64, 96), (576, 1536), (75, 33), (1, 5))
"""(in features, out features), multiples of vector widths and not."""
ROWS = (0, 1, 2, 7, 33)
TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}


class LinearMethodConformance(Conformance):
    """The linear-method contract, against ``TorchLinearMethod`` in float32."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[Dtype, ...]] = ("float32", "bfloat16")
    """The precisions that it claims."""
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def methods(self) -> list[tuple[Dtype, LinearMethod]]:
        """The method of each dtype; skips, with its reason, where it cannot run."""
        torch.manual_seed(0)
        entry = load_plugins().linear_methods()[self.name]
        built = []
        for dtype in self.dtypes:
            config = replace(EngineConfig(), model=ModelConfig(dtype=dtype))
            suits = entry.suits(config)
            if suits.score <= 0:
                pytest.skip(f"{self.name} cannot run here: {suits.reason}")
            built.append((dtype, entry.build(compute_context(config, self.device))))
        return built

    def test_it_agrees_with_the_twin(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            for sizes in SIZES:
                for bias in (False, True):
                    weight, twin, twin_weight = self.pair(method, dtype, sizes, bias=bias)
                    for rows in ROWS:
                        x = torch.randn(rows, sizes[0], device=self.device).to(getattr(torch, dtype))
                        expected = twin.apply(twin_weight, x.float())
                        assert_near(method.apply(weight, x), expected, dtype, x.dtype)
                        assert_near(method.apply(weight, x, out_dtype=torch.float32), expected, dtype, torch.float32)

    def test_its_sizes_are_those_asked_for(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            weight = method.create(75, 33, bias=False, dtype=getattr(torch, dtype))
            assert (weight.in_features, weight.out_features) == (75, 33)

    def test_rows_may_be_strided(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            weight, _, _ = self.pair(method, dtype, (64, 96), bias=True)
            x = torch.randn(5, 200, device=self.device).to(getattr(torch, dtype))[:, 16:80]
            assert torch.equal(method.apply(weight, x), method.apply(weight, x.contiguous()))

    def test_it_embeds_rows_exactly(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            weight, twin, twin_weight = self.pair(method, dtype, (75, 33), bias=False)
            token_ids = torch.tensor([0, 32, 5, 5, 17], device=self.device)
            found = method.embed(weight, token_ids)
            assert torch.equal(found, twin.embed(twin_weight, token_ids).to(found.dtype))

    def test_it_embeds_the_rows_that_it_holds(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            weight, twin, twin_weight = self.pair(method, dtype, (75, 33), bias=False)
            token_ids = torch.tensor([99, 100, 132, 133, 0, 101], device=self.device)
            found = method.embed(weight, token_ids, first_id=100)
            assert torch.equal(found, twin.embed(twin_weight, token_ids, first_id=100).to(found.dtype))
            assert found.any(dim=1).tolist() == [False, True, True, False, False, True]

    def test_weights_that_were_released_come_back(self, methods: list[tuple[Dtype, LinearMethod]]) -> None:
        for dtype, method in methods:
            if not isinstance(method, ReleasableWeights):
                continue
            dtype_of = getattr(torch, dtype)
            weight = method.create(64, 96, bias=False, dtype=dtype_of)
            first, second = torch.randn(2, 96, 64).to(dtype_of)
            x = torch.randn(3, 64, device=self.device).to(dtype_of)
            method.load_shard(weight, first, first_row=0)
            expected = method.apply(weight, x).clone()
            method.release_weights(keep=True)
            method.release_weights(keep=True)
            method.restore_weights()
            assert torch.equal(method.apply(weight, x), expected)
            method.discard_weights()
            method.load_shard(weight, second, first_row=0)
            assert not torch.equal(method.apply(weight, x), expected)
            method.release_weights(keep=True)
            method.release_weights(keep=False)
            method.restore_weights()
            method.load_shard(weight, first, first_row=0)
            assert torch.equal(method.apply(weight, x), expected)

    def pair(
        self, method: LinearMethod, dtype: Dtype, sizes: tuple[int, int], *, bias: bool
    ) -> tuple[LinearWeight, TorchLinearMethod, LinearWeight]:
        """One random weight in ``method`` and in the twin, loaded in uneven blocks of rows."""
        in_features, out_features = sizes
        twin = TorchLinearMethod(compute_context(EngineConfig(model=ModelConfig(dtype="float32")), self.device))
        values = torch.randn(out_features, in_features).to(getattr(torch, dtype))
        offsets = torch.randn(out_features).to(getattr(torch, dtype))
        cut = out_features // 3 + 1
        loaded: list[LinearWeight] = []
        for one, kept in ((method, getattr(torch, dtype)), (twin, torch.float32)):
            weight = one.create(in_features, out_features, bias=bias, dtype=kept)
            first = 0
            for block in (values[:cut], values[cut:]):
                one.load_shard(weight, block, first_row=first)
                first += block.shape[0]
            if bias:
                one.load_bias(weight, offsets, first_row=0)
            loaded.append(weight)
        return loaded[0], twin, loaded[1]


def compute_context(config: EngineConfig, device: str) -> ComputeContext:
    """What a linear method or operators are built from, in the dtype of ``config``."""
    return ComputeContext(config=config, device=torch.device(device), dtype=getattr(torch, config.model.dtype))


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: Dtype, wanted: torch.dtype) -> None:
    """Of dtype ``wanted``, and as near to the float32 ``expected`` as ``dtype`` allows."""
    assert found.dtype == wanted
    tolerance = TOLERANCES[dtype]
    scale = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * max(1.0, scale))
