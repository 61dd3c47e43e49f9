"""How contexts are cut: upper bounds only, the device filled, no split without work."""

from __future__ import annotations

import pytest

from fourfold_kernels_triton.tiles import FEW_TILES, LEAST_SPLITS, MANY_TILES, PROGRAMS_EACH, split_context

WANTED = 132 * PROGRAMS_EACH


def test_one_sequence_fills_the_device():
    split = split_context(8, 40960, 64, 132)
    assert 8 * split.most >= WANTED
    assert split.min_tiles == FEW_TILES


def test_a_full_batch_is_still_cut_where_contexts_may_be_long():
    assert split_context(2048, 40960, 64, 132) == (LEAST_SPLITS, MANY_TILES)


@pytest.mark.parametrize(("longest", "most"), [(1, 1), (128, 1), (129, 2), (1024, 8)])
def test_no_more_splits_than_the_longest_context_can_use(longest, most):
    assert split_context(8, longest, 64, 132).most == most
