"""The operators against core's torch twin, run in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fourfold.errors import Unsupported
from fourfold.layers.torch_operators import TorchOperators
from fourfold_kernels_cpu.operators import Avx512Operators

ONE_ROUNDING = {"rtol": 2**-7, "atol": 1e-6}


@pytest.fixture
def operators(compute_context):
    return Avx512Operators(compute_context)


@pytest.fixture
def twin(compute_context):
    return TorchOperators(replace(compute_context, dtype=torch.float32))


@pytest.mark.parametrize("shape", [(1, 576), (7, 1536), (33, 75), (3, 4, 64), (0, 64), (2, 5000)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(operators, twin, shape, offset):
    x, weight = torch.randn(shape).bfloat16() * 3, torch.randn(shape[-1]).bfloat16()
    got = operators.rms_norm(x, weight, 1e-5, weight_offset=offset)
    expected = twin.rms_norm(x.float(), weight.float(), 1e-5, weight_offset=offset)
    torch.testing.assert_close(got.float(), expected, **ONE_ROUNDING)


def test_rms_norm_of_strided_rows(operators):
    wide, weight = torch.randn(6, 128).bfloat16(), torch.randn(64).bfloat16()
    rows = wide[:, 32:96]
    assert torch.equal(operators.rms_norm(rows, weight, 1e-5), operators.rms_norm(rows.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("shape", [(1, 576), (40, 100), (0, 32)])
def test_add_rms_norm_is_add_then_norm(operators, shape):
    x, residual, weight = (torch.randn(size).bfloat16() for size in (shape, shape, shape[-1:]))
    expected_sum = residual + x
    expected = operators.rms_norm(expected_sum, weight, 1e-5)
    normed, summed = operators.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(summed, expected_sum)
    assert torch.equal(normed, expected)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_head_rms_norm(operators, twin, head_dim):
    qkv, weight = torch.randn(5, 9 * head_dim).bfloat16(), torch.randn(head_dim).bfloat16()
    expected = qkv.float()
    twin.head_rms_norm(expected, weight.float(), 1e-6, first_head=4, num_heads=3, head_dim=head_dim)
    before = qkv.clone()
    operators.head_rms_norm(qkv, weight, 1e-6, first_head=4, num_heads=3, head_dim=head_dim)
    torch.testing.assert_close(qkv.float(), expected, **ONE_ROUNDING)
    assert torch.equal(qkv[:, : 4 * head_dim], before[:, : 4 * head_dim])
    assert torch.equal(qkv[:, 7 * head_dim :], before[:, 7 * head_dim :])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (9, 1025), (3, 7), (0, 16)])
def test_gated(operators, twin, activation, rows, width):
    gate_up = torch.randn(rows, 2 * width).bfloat16() * 4
    got = operators.gated(gate_up, activation)
    torch.testing.assert_close(got.float(), twin.gated(gate_up.float(), activation), rtol=2**-7, atol=2e-6)


def test_gated_far_out(operators, twin):
    gate = torch.tensor([[-300.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 300.0, 1e30, -3e38]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1).bfloat16()
    for activation in ("silu", "gelu", "gelu_tanh"):
        expected = twin.gated(gate_up.float(), activation)
        torch.testing.assert_close(operators.gated(gate_up, activation).float(), expected, rtol=2**-7, atol=1e-6)


def test_unknown_activation_is_refused(operators):
    with pytest.raises(Unsupported, match="no activation 'relu'"):
        operators.gated(torch.zeros(1, 2, dtype=torch.bfloat16), "relu")


def test_scale_rounds_the_factor_first(operators, compute_context):
    x = torch.randn(5, 100).bfloat16()
    for factor in (24.0, 33.94, 0.1, 1.0):
        assert torch.equal(operators.scale(x.clone(), factor), TorchOperators(compute_context).scale(x, factor))


def test_soft_cap(operators, twin):
    logits = torch.randn(3, 1001) * 40
    logits[0, 0], logits[0, 1] = float("-inf"), 1e-3
    expected = twin.soft_cap(logits, 30.0)
    torch.testing.assert_close(operators.soft_cap(logits.clone(), 30.0), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 49152), (5, 49155), (3, 17), (70, 8192), (2, 1), (0, 100)])
def test_argmax_takes_the_first_of_equals(operators, rows, width):
    logits = torch.randint(-3, 4, (rows, width)).float()
    assert torch.equal(operators.argmax(logits), torch.from_numpy(logits.numpy().argmax(-1)))
    logits = torch.randn(rows, width)
    assert torch.equal(operators.argmax(logits), logits.argmax(-1))


def test_argmax_of_nothing_finite_is_zero(operators):
    assert operators.argmax(torch.full((2, 40), float("-inf"))).tolist() == [0, 0]


@pytest.mark.parametrize("width", [49152, 49155, 33])
def test_gumbel_argmax_draws_what_the_twin_draws(operators, twin, width):
    logits = torch.randn(24, width)
    logits[:, ::7] = float("-inf")
    scales = torch.rand(24) * 3 + 0.1
    seeds = torch.randint(0, 2**63 - 1, (24,))
    positions = torch.randint(0, 100_000, (24,))
    got = operators.gumbel_argmax(logits, scales, seeds, positions)
    assert torch.equal(got, twin.gumbel_argmax(logits, scales, seeds, positions))


def test_gumbel_noise_itself(operators):
    """With one finite pair, the winner tells the sign of a noise difference; with equal logits, the largest noise."""
    from fourfold.layers.philox import gumbel_rows

    seeds, positions = torch.arange(200), torch.arange(200) * 3
    flat = torch.zeros(200, 1000)
    noise = gumbel_rows(seeds, positions, 1000)
    assert torch.equal(operators.gumbel_argmax(flat, torch.ones(200), seeds, positions), noise.argmax(-1))


def test_gumbel_argmax_of_scale_zero_is_greedy(operators):
    logits = torch.randn(3, 500)
    got = operators.gumbel_argmax(logits, torch.zeros(3), torch.arange(3), torch.arange(3))
    assert torch.equal(got, logits.argmax(-1))


def test_log_normalizer(operators):
    logits = torch.randn(6, 49155) * 5
    logits[1, 3:] = float("-inf")
    logits[2] += 500
    expected = torch.logsumexp(logits.double(), -1).float()
    torch.testing.assert_close(operators.log_normalizer(logits), expected, rtol=1e-6, atol=1e-5)


def test_results_do_not_depend_on_threads(operators, thread_counts):
    logits, x = torch.randn(9, 30000), torch.randn(50, 2048).bfloat16()
    weight, seeds = torch.randn(2048).bfloat16(), torch.arange(9)
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(
            (
                operators.argmax(logits),
                operators.log_normalizer(logits),
                operators.gumbel_argmax(logits, torch.ones(9), seeds, seeds),
                operators.rms_norm(x, weight, 1e-5),
                operators.gated(x, "silu"),
            )
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
