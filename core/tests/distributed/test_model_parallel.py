from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.distributed.model_parallel import GroupLinks, initialize_model_parallel
from fourfold.errors import ConfigError
from fourfold.layout import ParallelLayout


class Communicator:
    def __init__(self, name: str) -> None:
        self.name, self.closed = name, 0

    def close(self) -> None:
        self.closed += 1


def connect(group: str, ranks: tuple[int, ...], rank: int) -> Any:
    communicator: Any = Communicator(f"{group}{list(ranks)}@{rank}")
    return GroupLinks(name=group, communicator=communicator, host=communicator)


def test_groups_of_every_rank() -> None:
    layout = ParallelLayout(dp=2, pp=2, tp=2)
    groups = [initialize_model_parallel(layout, rank, connect) for rank in range(8)]
    assert sorted({one.pp.ranks for one in groups}) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sorted({one.dp.ranks for one in groups}) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sorted({one.ep.ranks for one in groups}) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert sorted({one.tp.ranks for one in groups}) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for rank, one in enumerate(groups):
        for group in (one.tp, one.pp, one.dp, one.ep):
            assert group.ranks[group.rank] == rank


def test_four_stages_of_two() -> None:
    one = initialize_model_parallel(ParallelLayout(pp=4, tp=2), 5, connect)
    assert (one.tp.ranks, one.tp.rank) == ((4, 5), 1)
    assert (one.pp.ranks, one.pp.rank) == ((1, 3, 5, 7), 2)
    assert not one.pp.is_first
    assert not one.pp.is_last
    assert one.dp.communicator is None, "a group of one rank connects to nobody"


def test_groups_of_one_rank_cost_nothing() -> None:
    def fail(group: str, ranks: tuple[int, ...], rank: int) -> Any:
        raise AssertionError("nothing to connect")

    group = initialize_model_parallel(ParallelLayout(), 0, fail).tp
    tensor = torch.ones(2)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.reduce_scatter(tensor) is tensor
    assert group.broadcast(tensor) is tensor
    assert group.gather(tensor) == [tensor]
    group.barrier()
    with group.capture():
        pass
    group.close()


def test_close_reaches_every_group() -> None:
    one = initialize_model_parallel(ParallelLayout(pp=2, tp=2), 0, connect)
    one.close()
    assert one.tp.communicator.closed == one.pp.communicator.closed == 1  # type: ignore[union-attr]


def test_a_rank_outside_the_layout() -> None:
    with pytest.raises(ConfigError, match="rank 4 is outside 0 to 3"):
        initialize_model_parallel(ParallelLayout(tp=4), 4, connect)


def test_a_group_needs_its_communicator() -> None:
    with pytest.raises(ConfigError, match=r"the tp group \[0, 1\] needs a communicator"):
        GroupCoordinator(name="tp", ranks=(0, 1), rank=0)
