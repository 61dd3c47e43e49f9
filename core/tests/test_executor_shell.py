"""What executors share, over the smallest one: its ranks are a function."""

from __future__ import annotations

import pytest

from fourfold.config.options import build_engine_config
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, ExecutorClosed, ExecutorFailed
from fourfold.executor_shell import ExecutorShell
from fourfold.rpc_call import read_error, report_error, run_call


class Ranks(ExecutorShell):
    """Each rank is its own number."""

    def _call(self, call):
        self._check_open(call.name)
        self.timeout = call.timeout
        content = call.encoded()
        return call.result([run_call(Rank(rank), content, rank=rank) for rank in range(self.world_size)])


class Rank:
    def __init__(self, rank):
        self.rank = rank

    def times(self, factor, *, plus=0):
        return self.rank * factor + plus


@pytest.fixture
def ranks():
    config = build_engine_config(tensor_parallel_size=3, rpc_timeout=7)
    return Ranks(ExecutorContext(config=config, layout=config.parallel.layout))


def test_the_shapes_of_a_call(ranks):
    assert ranks.collective_rpc("times", args=(2,), kwargs={"plus": 1}) == [1, 3, 5]
    assert ranks.timeout == 7
    assert ranks.collective_rpc("times", args=(2,), reply_rank=2, timeout=0.5) == 4
    assert ranks.timeout == 0.5
    assert ranks.collective_rpc("times", args=(2,), aggregate=sum, reply_rank=1) == 6
    assert ranks.collective_rpc("times", args=(2,), non_block=True).result(0) == [0, 2, 4]
    assert ranks.collective_rpc("times", non_block=True).exception(0) is not None
    for rank in (-1, 3):
        with pytest.raises(ConfigError, match=f"reply_rank is {rank}; this executor has ranks 0 to 2"):
            ranks.collective_rpc("times", args=(2,), reply_rank=rank)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(ranks, timeout):
    with pytest.raises(ConfigError, match=f"timeout is {timeout:g}; seconds from 0 on, and below 1e"):
        ranks.collective_rpc("times", args=(2,), timeout=timeout)


def test_it_fails_once_and_tells_all_whatever_one_of_them_does(ranks):
    heard = []
    first, second = ExecutorFailed("first"), ExecutorFailed("second")
    ranks.on_failure(lambda error: 1 / 0)
    ranks.on_failure(heard.append)
    assert ranks._fail(first, first=lambda: heard.append("before")) is first
    assert ranks._fail(second) is first
    ranks.on_failure(heard.append)
    assert heard == ["before", first, first]
    with pytest.raises(ExecutorFailed, match="'times' was called, but the executor has failed: first"):
        ranks.collective_rpc("times", args=(1,))


def test_nothing_fails_after_the_end(ranks):
    heard = []
    ranks.on_failure(heard.append)
    assert [ranks._close(), ranks._close()] == [True, False]
    ranks._fail(ExecutorFailed("late"))
    assert heard == []
    with pytest.raises(ExecutorClosed, match="'times' was called after shutdown"):
        ranks.collective_rpc("times", args=(1,))


def test_an_error_travels_with_its_place():
    try:
        run_call(Rank(1), b"\xc1", rank=1)
    except Exception as error:
        found = read_error(report_error(error, "times"), rank=1)
    assert (found.rank, found.phase) == (1, "times")
    assert "in run_call" in found.traceback
    assert found.__notes__ == [f"on rank 1:\n{found.traceback.rstrip()}"]
