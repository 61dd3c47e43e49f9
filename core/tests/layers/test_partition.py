from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import ConfigError
from fourfold.layers.partition import cut_evenly, cut_features, cut_heads, vocabulary_rows


def test_nine_heads_over_two_ranks() -> None:
    first, second = cut_heads(9, 3, 0, 2), cut_heads(9, 3, 1, 2)
    assert (first.heads, first.kv_heads, first.group_sizes) == (range(5), range(2), (3, 2))
    assert (second.heads, second.kv_heads, second.group_sizes) == (range(5, 9), range(1, 3), (1, 3))


def test_nine_heads_over_three_and_nine_ranks() -> None:
    assert [cut_heads(9, 3, rank, 3).heads for rank in range(3)] == [range(3), range(3, 6), range(6, 9)]
    assert [list(cut_heads(9, 3, rank, 9).kv_heads) for rank in range(9)] == [[0]] * 3 + [[1]] * 3 + [[2]] * 3


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 10, but the model has 9 query heads; from 1 to 9"):
        cut_heads(9, 3, 0, 10)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_heads_are_covered_once_and_served_by_their_own(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    num_heads = num_kv_heads * group
    world_size = data.draw(st.integers(1, num_heads))
    cuts = [cut_heads(num_heads, num_kv_heads, rank, world_size) for rank in range(world_size)]
    assert [head for cut in cuts for head in cut.heads] == list(range(num_heads))
    sizes = [len(cut.heads) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1
    for cut in cuts:
        served = [kv_head for kv_head, size in zip(cut.kv_heads, cut.group_sizes, strict=True) for _ in range(size)]
        assert served == [head // group for head in cut.heads]
        assert min(cut.group_sizes) >= 1


@given(st.integers(1, 5000), st.integers(1, 16))
def test_features_are_covered_once(size: int, world_size: int) -> None:
    world_size = min(world_size, size)
    parts = [cut_features(size, rank, world_size) for rank in range(world_size)]
    assert [feature for part in parts for feature in part] == list(range(size))
    assert all(parts)


def test_features_stay_in_units() -> None:
    assert [len(cut_features(1536, rank, 5)) for rank in range(5)] == [320, 320, 320, 320, 256]
    assert [len(cut_features(100, rank, 3)) for rank in range(3)] == [36, 32, 32]


@given(st.integers(0, 300), st.integers(1, 9))
def test_even_cut_differs_by_one(count: int, world_size: int) -> None:
    sizes = [len(cut_evenly(count, rank, world_size)) for rank in range(world_size)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_vocabulary_is_padded_only_when_cut() -> None:
    assert vocabulary_rows(49152, 1) == 49152
    assert vocabulary_rows(49152, 5) == 9856
    assert vocabulary_rows(131, 2) == 128
