from __future__ import annotations

import math

import pytest
import torch

from fourfold.layers.rotary import inverse_frequencies, rotary_table
from fourfold.models.description import RotaryDescription

CPU = torch.device("cpu")


def test_table_holds_cosines_then_sines() -> None:
    table = rotary_table(RotaryDescription(theta=100.0, dim=4), 7, CPU)
    assert table.shape == (7, 4)
    assert table.dtype == torch.float32
    expected = [math.cos(5), math.cos(0.5), math.sin(5), math.sin(0.5)]
    assert table[5].tolist() == pytest.approx(expected, abs=1e-6)


def test_dynamic_is_unscaled_up_to_the_length_of_training() -> None:
    plain = RotaryDescription(theta=1e4, dim=32)
    dynamic = RotaryDescription(kind="dynamic", theta=1e4, dim=32, factor=4.0, original_max_position=64)
    assert torch.equal(inverse_frequencies(dynamic, 64), inverse_frequencies(plain, 64))
    stretched = inverse_frequencies(dynamic, 65)
    assert (stretched[1:] < inverse_frequencies(plain, 65)[1:]).all()


def test_llama3_keeps_fast_and_divides_slow_dimensions() -> None:
    rotary = RotaryDescription(kind="llama3", theta=5e5, dim=128, factor=8.0, original_max_position=8192)
    plain = inverse_frequencies(RotaryDescription(theta=5e5, dim=128), 1)
    ratio = plain / inverse_frequencies(rotary, 1)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert ((ratio >= 1) & (ratio <= 8.001)).all()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_yarn_multiplies_the_table_by_its_temperature() -> None:
    rotary = RotaryDescription(
        kind="yarn", theta=1e4, dim=8, factor=4.0, original_max_position=32, attention_factor=1.25
    )
    assert rotary_table(rotary, 2, CPU)[0].tolist() == [1.25] * 4 + [0.0] * 4
