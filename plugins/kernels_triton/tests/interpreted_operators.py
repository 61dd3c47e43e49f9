"""Run by test_interpreted: the operators against core's torch twin."""

from __future__ import annotations

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.philox import gumbel_rows
from fourfold.layers.torch_operators import TorchOperators
from fourfold.testing.expert_choosing import MIXTURES, ExpertChoosingConformance
from fourfold.testing.operators import OperatorsConformance
from fourfold_kernels_triton import gpu_support
from fourfold_kernels_triton.operators import TritonOperators


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_support, "unsupported_reason", lambda: None)


@pytest.fixture
def operators():
    return TritonOperators(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.bfloat16))


@pytest.fixture
def twin():
    return TorchOperators(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))


class TestConformance(OperatorsConformance):
    name = "triton"


class TestChoosing(ExpertChoosingConformance):
    name = "triton"


def test_the_noise_is_the_contracts_to_the_last_bit(operators):
    """Equal logits, so that the largest noise wins, over more than one block of the vocabulary."""
    seeds, positions = torch.randint(2**63 - 1, (6,)), torch.randint(100_000, (6,))
    noise = gumbel_rows(seeds, positions, 5003)
    found = operators.gumbel_argmax(torch.zeros(6, 5003), torch.ones(6), seeds, positions)
    assert torch.equal(found, noise.argmax(-1))


def test_a_draw_without_temperature_is_the_argmax(operators):
    logits = torch.randn(3, 5003).round()
    found = operators.gumbel_argmax(logits, torch.zeros(3), torch.arange(3), torch.arange(3))
    assert torch.equal(found, operators.argmax(logits))


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_any_row_gives_an_index_of_the_vocabulary(operators, bad):
    logits = torch.full((2, 2500), bad)
    for found in (
        operators.argmax(logits),
        operators.gumbel_argmax(logits, torch.ones(2), torch.arange(2), torch.arange(2)),
    ):
        assert bool(((found >= 0) & (found < 2500)).all())


def test_counters_are_zero_after_a_launch(operators):
    logits = torch.randn(2, 5000)
    assert torch.equal(operators.argmax(logits), operators.argmax(logits))
    assert not operators._counters.at_least(2).any()


def test_rows_of_a_wider_tensor(operators, twin):
    wide = torch.randn(4, 3000)
    rows = wide[:, :2999]
    assert torch.equal(operators.argmax(rows), rows.argmax(-1))
    torch.testing.assert_close(operators.log_normalizer(rows), twin.log_normalizer(rows))


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_far_out_activations(operators, twin):
    gate = torch.tensor([[-300.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 300.0, 1e30, -3e38]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(
            operators.gated(gate_up.bfloat16(), activation).float(),
            twin.gated(gate_up.bfloat16().float(), activation),
            rtol=2**-7,
            atol=1e-6,
        )


def test_small_logits_keep_their_precision_under_a_cap(operators, twin):
    logits = torch.logspace(-6, 3, 400).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(
        operators.soft_cap(logits.clone(), 30.0), twin.soft_cap(logits, 30.0), rtol=3e-6, atol=0.0
    )


def test_unknown_activation_is_refused(operators):
    with pytest.raises(Unsupported, match="no activation 'relu'"):
        operators.gated(torch.zeros(1, 2), "relu")


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice encountered")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_an_expert_is_chosen_once_whatever_the_logits(operators, value):
    for mixture in MIXTURES:
        bias = torch.zeros(mixture.num_experts) if mixture.score_bias else None
        logits = torch.full((3, mixture.num_experts), value)
        logits[1, 1:] = 1.0
        for row in operators.choose_experts(logits, bias, mixture)[0].tolist():
            assert len(set(row)) == mixture.top_k
            assert all(0 <= expert < mixture.num_experts for expert in row)
