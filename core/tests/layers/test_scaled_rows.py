"""Rows in e4m3: how near they come back, at any size of values, and that nothing leaves the range."""

from __future__ import annotations

import pytest
import torch

from fourfold.layers.scaled_rows import SCALE_BYTES, pack_rows, unpack_rows


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_they_come_back_within_a_step_of_e4m3(size):
    torch.manual_seed(0)
    rows = size * torch.randn(50, 3, 64)
    packed = pack_rows(rows)
    assert packed.shape == (50, 3, 64 + SCALE_BYTES)
    assert packed.dtype == torch.uint8
    error = (unpack_rows(packed) - rows).abs()
    largest = rows.abs().amax(-1, keepdim=True)
    assert bool((error <= torch.maximum(rows.abs() / 16, largest / 448 / 512)).all())


def test_the_largest_value_of_a_row_stays_finite():
    rows = torch.rand(1000, 16) * torch.logspace(-20, 20, 1000)[:, None]
    assert bool(unpack_rows(pack_rows(rows)).isfinite().all())


def test_zeros_stay_zero():
    assert not unpack_rows(pack_rows(torch.zeros(2, 8))).any()
