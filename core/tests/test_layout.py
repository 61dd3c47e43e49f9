"""Rank arithmetic: the known groups, and what holds for any sizes."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import ConfigError
from fourfold.layout import ParallelLayout

SIZES = st.integers(1, 5)
LAYOUTS = st.builds(ParallelLayout, external_dp=st.integers(1, 2), dp=SIZES, pp=SIZES, tp=SIZES)


def test_eight_ranks_in_stages_of_two() -> None:
    layout = ParallelLayout(tp=2, pp=4)
    assert layout.tp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.pp_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.output_rank == 6


def test_two_of_everything() -> None:
    layout = ParallelLayout(dp=2, pp=2, tp=2)
    assert layout.pp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(layout.dp_groups()) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.ep_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.output_rank == 2


def test_four_replicas_of_two() -> None:
    layout = ParallelLayout(dp=4, tp=2)
    assert layout.dp_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.ep_groups() == [list(range(8))]


def test_replicas_of_an_outer_launcher_share_no_experts() -> None:
    layout = ParallelLayout(external_dp=2, dp=2, tp=2)
    assert layout.dp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.ep_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_labels() -> None:
    layout = ParallelLayout(external_dp=2, dp=2, pp=2, tp=4)
    assert layout.label(0) == "DP0.PP0.TP0"
    assert layout.label(layout.world_size - 1) == "DP3.PP1.TP3"


@given(LAYOUTS)
def test_groups_of_every_axis_partition_the_ranks(layout: ParallelLayout) -> None:
    everyone = list(range(layout.world_size))
    sizes = {
        "tp_groups": layout.tp,
        "pp_groups": layout.pp,
        "dp_groups": layout.dp,
        "ep_groups": layout.dp * layout.tp,
    }
    for name, size in sizes.items():
        groups = getattr(layout, name)()
        assert sorted(chain.from_iterable(groups)) == everyone
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


@given(LAYOUTS)
def test_two_groups_of_different_axes_meet_in_one_rank_at_most(layout: ParallelLayout) -> None:
    for tp_group in layout.tp_groups():
        for other in (*layout.pp_groups(), *layout.dp_groups()):
            assert len(set(tp_group) & set(other)) <= 1


@given(LAYOUTS, st.integers(0, 10_000))
def test_coordinates_are_the_inverse_of_ranks(layout: ParallelLayout, number: int) -> None:
    rank = number % layout.world_size
    coordinate = layout.coordinate(rank)
    assert layout.rank(coordinate) == rank
    assert ((coordinate.external_dp * layout.dp + coordinate.dp) * layout.pp + coordinate.pp) * layout.tp + (
        coordinate.tp
    ) == rank


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=0; every axis is at least 1"):
        ParallelLayout(tp=0)
    with pytest.raises(ConfigError, match="rank 4 is outside 0 to 3 of 1 external dp x 1 dp x 2 pp x 2 tp"):
        ParallelLayout(pp=2, tp=2).coordinate(4)
