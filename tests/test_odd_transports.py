"""Pipeline stages over transports that are late, slow or without buffers: a buffer reused too soon would show."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold.testing.stage_cases import outruns_its_reader, runs_a_pipeline

Pool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def odd_pool(faults: Path) -> Iterator[Pool]:
    """Ranks that have the plugin."""
    pools: dict[int, RankPool] = {}
    path = os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("name", ["delayed", "slow", "unbuffered"])
def test_steps_pass_four_stages(odd_pool: Pool, name: str) -> None:
    odd_pool(4).run(runs_a_pipeline, name, "cpu", 1, 15)


@pytest.mark.parametrize("name", ["delayed", "slow", "unbuffered"])
def test_a_stage_may_outrun_the_next_one(odd_pool: Pool, name: str) -> None:
    odd_pool(2).run(outruns_its_reader, name, "cpu")


def test_steps_pass_stages_of_two_ranks(odd_pool: Pool) -> None:
    odd_pool(4).run(runs_a_pipeline, "delayed", "cpu", 2, 10)


def sends_late(rank: Rank) -> float:
    """What arrives of a tensor that is changed right after its send began, without a buffer between."""
    from fourfold_faults.transports import DelayedTransport

    with connected(rank, "delayed", "cpu") as communicator:
        assert isinstance(communicator, DelayedTransport)
        if rank.rank == 0:
            sender = communicator.sender(1, nbytes=8, depth=1)
            mine = torch.zeros(16, dtype=torch.uint8)
            handle = sender._start(mine)
            mine.fill_(7)
            handle.wait()
            rank.store.wait(["arrived"])
            return 7.0
        receiver = communicator.receiver(0, nbytes=8, depth=1)
        target = torch.zeros(16, dtype=torch.uint8)
        receiver._start(target).wait()
        rank.store.set("arrived", "")
        return float(target.double().mean())


def test_a_delayed_send_reads_late(odd_pool: Pool) -> None:
    assert odd_pool(2).run(sends_late) == [7.0, 7.0]
