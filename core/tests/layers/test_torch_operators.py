from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.philox import gumbel_rows
from fourfold.layers.torch_operators import TorchOperators


@pytest.fixture
def operators() -> TorchOperators:
    context = ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32)
    return TorchOperators(context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(operators: TorchOperators, dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    got = operators.rms_norm(x, weight, 1e-5, weight_offset=offset)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_add_rms_norm(operators: TorchOperators) -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    total = x + residual
    expected = operators.rms_norm(total, weight, 1e-6)
    normed, kept = operators.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(kept, total)
    assert torch.equal(normed, expected)


def test_head_rms_norm_touches_its_heads_alone(operators: TorchOperators) -> None:
    qkv, weight = torch.randn(4, 6 * 8), torch.randn(8)
    before = qkv.clone().view(4, 6, 8)
    operators.head_rms_norm(qkv, weight, 1e-6, first_head=1, num_heads=2, head_dim=8)
    after = qkv.view(4, 6, 8)
    assert torch.equal(after[:, 1:3], operators.rms_norm(before[:, 1:3], weight, 1e-6))
    assert torch.equal(after[:, 0], before[:, 0])
    assert torch.equal(after[:, 3:], before[:, 3:])


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", torch.nn.SiLU()),
        ("gelu", torch.nn.GELU()),
        ("gelu_tanh", torch.nn.GELU(approximate="tanh")),
    ],
)
def test_gated(operators: TorchOperators, activation: str, function: torch.nn.Module) -> None:
    gate, up = torch.randn(3, 10), torch.randn(3, 10)
    torch.testing.assert_close(operators.gated(torch.cat([gate, up], -1), activation), function(gate) * up)


def test_gated_refuses_unknown_activations(operators: TorchOperators) -> None:
    with pytest.raises(Unsupported, match="no activation 'relu'; there are silu"):
        operators.gated(torch.randn(1, 4), "relu")


def test_scale_rounds_the_factor_to_the_dtype(operators: TorchOperators) -> None:
    x = torch.randn(2, 8).to(torch.bfloat16)
    assert torch.equal(operators.scale(x, 24.3), x * torch.tensor(24.3, dtype=torch.bfloat16))


def test_soft_cap(operators: TorchOperators) -> None:
    logits = torch.tensor([[-100.0, 0.0, 3.0, 100.0]])
    torch.testing.assert_close(operators.soft_cap(logits.clone(), 30.0), 30 * torch.tanh(logits / 30))


def test_argmax_takes_the_first_of_equals(operators: TorchOperators) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [17, 900]] = 2.0
    logits[1, [999]] = 1.0
    assert operators.argmax(logits).tolist() == [17, 999, 0]
    assert operators.argmax(logits).dtype == torch.int64


def test_log_normalizer(operators: TorchOperators) -> None:
    logits = torch.randn(4, 100) * 50
    expected = logits.double().exp().sum(-1).log()
    torch.testing.assert_close(operators.log_normalizer(logits), expected.float())


def test_gumbel_argmax_equals_its_definition(operators: TorchOperators) -> None:
    logits = torch.randn(3, 203) * 3
    logits[0, 3:] = -torch.inf  # few entries: drawn one by one
    logits[1, ::2] = -torch.inf  # many: drawn as a row
    scale, seeds = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1, 2**40 + 5, 2**63 - 1])
    positions = torch.tensor([0, 7, 1_000_000])
    expected = (logits * scale[:, None] + gumbel_rows(seeds, positions, 203)).argmax(-1)
    assert torch.equal(operators.gumbel_argmax(logits.clone(), scale, seeds, positions), expected)


def test_gumbel_argmax_of_a_row_ignores_the_others(operators: TorchOperators) -> None:
    logits, scale = torch.randn(9, 64), torch.rand(9) + 0.5
    seeds, positions = torch.arange(9), torch.arange(9) * 3
    together = operators.gumbel_argmax(logits.clone(), scale, seeds, positions)
    for row in range(9):
        one = slice(row, row + 1)
        alone = operators.gumbel_argmax(logits[one].clone(), scale[one], seeds[one], positions[one])
        assert alone[0] == together[row]


def test_gumbel_argmax_draws_the_softmax(operators: TorchOperators) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(4000, 4)
    ids = operators.gumbel_argmax(logits, torch.ones(4000), torch.full((4000,), 3), torch.arange(4000))
    shares = ids.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.03, rtol=0)


def test_gumbel_argmax_skips_no_entry_that_could_win(operators: TorchOperators) -> None:
    positions = torch.arange(2000)
    for gap in (20.0, 26.0, 40.0, 1e5):
        logits = torch.zeros(2000, 8)
        logits[:, 1:] = -gap
        seeds = torch.zeros(2000, dtype=torch.int64)
        expected = (logits + gumbel_rows(seeds, positions, 8)).argmax(-1)
        assert torch.equal(operators.gumbel_argmax(logits, torch.ones(2000), seeds, positions), expected)


def test_gumbel_argmax_of_inverse_temperature_zero_is_argmax(operators: TorchOperators) -> None:
    logits = torch.randn(3, 50)
    scale = torch.tensor([0.0, 1.0, 0.0])
    ids = operators.gumbel_argmax(logits, scale, torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64))
    noisy = logits[1] + gumbel_rows(torch.tensor([2]), torch.tensor([0]), 50)[0]
    assert ids.tolist() == [int(logits[0].argmax()), int(noisy.argmax()), int(logits[2].argmax())]
