"""What all operators must do: agree with core's torch twin. A test sets ``name`` and, if need be, ``dtypes``."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype, ModelConfig
from fourfold.contracts.operators import CheckedDraws, Operators
from fourfold.layers.torch_operators import TorchOperators
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance
from fourfold.testing.linear_method import assert_near, compute_context

EPSILON = 1e-6
HIDDEN = (64, 75, 576)
ROWS = (1, 3, 17)
VOCABULARY = (5, 1000, 4099)


class OperatorsConformance(Conformance):
    """The operators contract, against ``TorchOperators`` in float32."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[Dtype, ...]] = ("float32", "bfloat16")
    """The precisions that they claim."""
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def twin(self) -> TorchOperators:
        """Core's own, in float32."""
        return TorchOperators(compute_context(EngineConfig(model=ModelConfig(dtype="float32")), self.device))

    @pytest.fixture
    def built(self) -> list[tuple[Dtype, Operators]]:
        """The operators of each dtype; skips, with their reason, where they cannot run."""
        torch.manual_seed(0)
        entry = load_plugins().operators()[self.name]
        found = []
        for dtype in self.dtypes:
            config = EngineConfig(model=ModelConfig(dtype=dtype))
            suits = entry.suits(config)
            if suits.score <= 0:
                pytest.skip(f"{self.name} cannot run here: {suits.reason}")
            found.append((dtype, entry.build(compute_context(config, self.device))))
        return found

    def test_norms_agree_with_the_twin(self, built: list[tuple[Dtype, Operators]], twin: TorchOperators) -> None:
        for dtype, operators in built:
            for hidden in HIDDEN:
                weight = self.random(dtype, hidden)
                for rows in ROWS:
                    for offset in (0.0, 1.0):
                        x, residual = self.random(dtype, rows, hidden), self.random(dtype, rows, hidden)
                        found = operators.rms_norm(x.clone(), weight, EPSILON, weight_offset=offset)
                        expected = twin.rms_norm(x.float(), weight.float(), EPSILON, weight_offset=offset)
                        assert_near(found, expected, dtype, x.dtype)
                        normed, summed = operators.add_rms_norm(
                            x.clone(), residual.clone(), weight, EPSILON, weight_offset=offset
                        )
                        expected, total = twin.add_rms_norm(
                            x.float(), residual.float(), weight.float(), EPSILON, weight_offset=offset
                        )
                        assert_near(summed, total, dtype, x.dtype)
                        assert_near(normed, expected, dtype, x.dtype)

    def test_head_norm_touches_its_heads_only(self, built: list[tuple[Dtype, Operators]], twin: TorchOperators) -> None:
        for dtype, operators in built:
            qkv, weight = self.random(dtype, 7, 6 * 32), self.random(dtype, 32)
            expected = qkv.float().clone()
            twin.head_rms_norm(expected, weight.float(), EPSILON, first_head=1, num_heads=3, head_dim=32)
            found = qkv.clone()
            operators.head_rms_norm(found, weight, EPSILON, first_head=1, num_heads=3, head_dim=32)
            assert_near(found, expected, dtype, qkv.dtype)
            assert torch.equal(found[:, :32], qkv[:, :32])
            assert torch.equal(found[:, 4 * 32 :], qkv[:, 4 * 32 :])

    def test_activations_agree_with_the_twin(self, built: list[tuple[Dtype, Operators]], twin: TorchOperators) -> None:
        for dtype, operators in built:
            for activation in ("silu", "gelu", "gelu_tanh"):
                x = 3 * self.random(dtype, 5, 2 * 75)
                assert_near(operators.gated(x.clone(), activation), twin.gated(x.float(), activation), dtype, x.dtype)

    def test_scale_and_soft_cap_agree_with_the_twin(
        self, built: list[tuple[Dtype, Operators]], twin: TorchOperators
    ) -> None:
        for dtype, operators in built:
            x = self.random(dtype, 5, 75)
            assert_near(operators.scale(x.clone(), 1.5), twin.scale(x.float(), 1.5), dtype, x.dtype)
            logits = 40 * self.random("float32", 5, 75)
            assert_near(operators.soft_cap(logits.clone(), 30.0), twin.soft_cap(logits, 30.0), "float32", logits.dtype)

    def test_argmax_takes_the_first_of_equal_maxima(self, built: list[tuple[Dtype, Operators]]) -> None:
        for _, operators in built:
            for vocabulary in VOCABULARY:
                logits = self.random("float32", 9, vocabulary).round()
                found = operators.argmax(logits.clone())
                assert found.dtype == torch.int64
                expected = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
                assert torch.equal(found.cpu(), expected.cpu())

    def test_draws_agree_with_the_twin(self, built: list[tuple[Dtype, Operators]], twin: TorchOperators) -> None:
        for _, operators in built:
            for vocabulary in VOCABULARY:
                rows = 64
                logits = self.random("float32", rows, vocabulary)
                logits[:, ::3] = -torch.inf
                temperature = torch.full((rows,), 1.25, device=self.device)
                seeds = torch.randint(2**62, (rows,), device=self.device)
                positions = torch.arange(rows, device=self.device)
                found = operators.gumbel_argmax(logits.clone(), temperature, seeds, positions)
                expected = twin.gumbel_argmax(logits.clone(), temperature, seeds, positions)
                assert found.dtype == torch.int64
                # a draw whose two best differ by less than rounding may fall either way, so all but one must agree
                assert int((found != expected).sum()) <= 1
                assert bool(torch.isfinite(logits.gather(1, found[:, None])).all())

    def test_a_draw_depends_on_nothing_but_its_row(self, built: list[tuple[Dtype, Operators]]) -> None:
        for _, operators in built:
            logits = self.random("float32", 8, 1000)
            temperature = torch.ones(8, device=self.device)
            seeds, positions = torch.arange(8, device=self.device), torch.arange(8, device=self.device)
            whole = operators.gumbel_argmax(logits.clone(), temperature, seeds, positions)
            for row in range(8):
                one = slice(row, row + 1)
                alone = operators.gumbel_argmax(logits[one].clone(), temperature[one], seeds[one], positions[one])
                assert torch.equal(alone, whole[one])

    def test_checked_draws_are_draws_that_tell_broken_rows(self, built: list[tuple[Dtype, Operators]]) -> None:
        for _, operators in built:
            if not isinstance(operators, CheckedDraws):
                continue
            for vocabulary in VOCABULARY:
                logits = self.random("float32", 8, vocabulary)
                temperature = torch.tensor([0.0, 1.0] * 4, device=self.device)
                seeds, positions = torch.arange(8, device=self.device), torch.arange(8, device=self.device)
                expected = operators.gumbel_argmax(logits.clone(), temperature, seeds, positions)
                for row, entry, value in ((1, 0, torch.nan), (4, vocabulary - 1, torch.inf), (6, 0, -torch.inf)):
                    logits[row, entry] = value
                ids, codes = operators.draw(logits, temperature, seeds, positions)
                broken = torch.tensor([row in (1, 4, 6) for row in range(8)], device=self.device)
                assert torch.equal(codes, ids.masked_fill(broken, -1))
                assert torch.equal(codes[~broken], expected[~broken])
                assert bool(((ids >= 0) & (ids < vocabulary)).all())

    def test_log_normalizer_agrees_with_the_twin(
        self, built: list[tuple[Dtype, Operators]], twin: TorchOperators
    ) -> None:
        for _, operators in built:
            for vocabulary in VOCABULARY:
                logits = 20 * self.random("float32", 7, vocabulary)
                logits[:, ::4] = -torch.inf
                found = operators.log_normalizer(logits.clone())
                assert_near(found, twin.log_normalizer(logits), "float32", torch.float32)

    def random(self, dtype: Dtype, *shape: int) -> torch.Tensor:
        """Normal noise."""
        return torch.randn(*shape, device=self.device).to(getattr(torch, dtype))
