"""Sums over tensor-parallel ranks in two microbatches: what comes when, what it saves, and what stays whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.communicator import Communicator
from fourfold.contracts.host_recording import recording
from fourfold.contracts.step_part import StepVote
from fourfold.models.description import MixtureDescription
from fourfold.testing import moe_cases as cases
from fourfold.testing.communicator_cases import connected
from fourfold.testing.modelled_link import ModelledLink, VirtualClock, overlapped_seconds
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.overlap import Overlap

Pool = Callable[[int], RankPool]
WORK = StepVote(has_work=True, may_pause=False)
NUM_LAYERS = 6


def overlap(**options: Any) -> Overlap:
    return Overlap(ParallelConfig(enable_dbo=True, **options))


def run(link: Any, clock: Any, compute: float, *, num_tokens: int, least: int) -> torch.Tensor:
    """A step of layers that each compute and add up twice; ``compute`` seconds for all tokens, half for half."""
    part = overlap(dbo_prefill_tokens=least)
    part.expect_sums(link)
    part.begin_step(num_tokens, WORK, is_decode=False)

    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 * NUM_LAYERS):
            clock.wait(clock.now() + compute * len(x) / num_tokens)
            x = part.all_reduce(link, x)
        return x

    x = torch.arange(float(num_tokens))
    turns = part.take_turns(num_tokens)
    if turns is None:
        return body(x)
    half = num_tokens - num_tokens // 2
    return torch.cat(turns([partial(body, x[:half]), partial(body, x[half:])]))


@pytest.mark.parametrize(("compute", "travel"), [(4.0, 4.0), (8.0, 2.0), (2.0, 8.0), (4.0, 0.0)])
def test_the_makespan_is_that_of_the_event_model(compute: float, travel: float) -> None:
    clock = VirtualClock()
    found = run(ModelledLink(clock, travel), clock, 2 * compute, num_tokens=8, least=8)
    assert found.tolist() == [4.0**NUM_LAYERS * token for token in range(8)]
    assert clock.now() == overlapped_seconds(2 * NUM_LAYERS, compute, travel)


def test_below_the_threshold_it_is_the_serial_time() -> None:
    clock = VirtualClock()
    link = ModelledLink(clock, 4.0)
    run(link, clock, 8.0, num_tokens=7, least=8)
    assert clock.now() == pytest.approx(2 * NUM_LAYERS * (8.0 + 4.0))
    assert set(link.trace) == {"start 0", "sum 0"}


def test_one_half_computes_while_the_sum_of_the_other_travels() -> None:
    clock = VirtualClock()
    link = ModelledLink(clock, 1.0)
    run(link, clock, 1.0, num_tokens=2, least=2)
    assert link.trace[:6] == ["start 0", "start 1", "sum 0", "start 0", "sum 1", "start 1"]


def test_what_cannot_be_overlapped_is_said_once_and_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        rank = 3

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    part = overlap(dbo_decode_tokens=2)
    plain: Any = Plain()
    for _ in range(2):
        part.expect_sums(plain)
    part.begin_step(9, WORK, is_decode=True)
    assert part.take_turns(9) is None
    assert [record.message for record in caplog.records] == [
        "the sums of rank 3 are not overlapped: its communicator only sums at once"
    ]
    part.expect()  # tokens that travel
    part.begin_step(9, WORK, is_decode=True)
    turns = part.take_turns(9)
    assert turns is not None
    assert turns([lambda: part.all_reduce(plain, torch.ones(1)).item()] * 2) == [1.0, 1.0]
    assert part.counters() == {"overlapped_steps": 1.0}


def test_a_step_that_is_recorded_stays_whole() -> None:
    part = overlap(dbo_decode_tokens=2)
    part.expect()
    part.begin_step(4, WORK, is_decode=True)
    recorder: Any = object()
    with recording(recorder):
        assert part.take_turns(4) is None
    assert part.take_turns(4) is not None


def adds_up(rank: Rank, comm: str, layer: str) -> list[float]:
    """A mixture whose ranks have the same tokens, in two microbatches and whole."""
    backends = {"parallel_layer": f"moe={layer}", "comm": comm}
    mixture = MixtureDescription(**cases.MIXTURES[-1])
    tensors = cases.random_tensors(mixture, seed=2)
    with cases.grouped(rank, backends) as group:
        context = cases.context_of(group, backends, mixture)
        parallel = replace(context.config.parallel, enable_dbo=True, dbo_prefill_tokens=4, dbo_decode_tokens=6)
        context = replace(context, config=replace(context.config, parallel=parallel))
        layers: list[Any] = [cases.build_from(context, backends, tensors)[0] for _ in range(2)]
        part = context.shared["overlap"]
        for count, is_decode in ((9, False), (4, False), (6, True), (3, False), (5, True)):
            for one in context.shared.values():
                one.begin_step(count, WORK, is_decode=is_decode)
            x = torch.randn(count, cases.HIDDEN, generator=torch.Generator().manual_seed(count))
            turns = part.take_turns(count)
            whole = [x] if turns is None else [x[: count - count // 2], x[count - count // 2 :]]
            bodies = [partial(through, layers, rows) for rows in whole]
            found = torch.cat([body() for body in bodies] if turns is None else turns(bodies))
            cases.check(found, cases.dense(mixture, tensors, cases.dense(mixture, tensors, x)))
        return list(part.counters().values())


def through(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(("comm", "layer"), [("shm", "ep"), ("gloo", "ep"), ("shm", "overlapped")])
def test_ranks_with_the_same_tokens_add_up_in_turns(rank_pool: Pool, comm: str, layer: str) -> None:
    assert rank_pool(2).run(adds_up, comm, layer) == [[3.0], [3.0]]


def sums(rank: Rank) -> list[float]:
    """Over a real communicator, with the ranks at different speeds."""
    with connected(rank, "shm", "cpu") as communicator:
        return run(Slow(communicator, rank.rank), VirtualClock(), 1.0, num_tokens=6, least=2).tolist()


class Slow:
    """A communicator whose second rank comes late to every third sum."""

    def __init__(self, inner: Communicator, rank: int) -> None:
        self._inner: Any = inner
        self._late = rank == 1
        self.channels = inner.channels
        self._count = 0

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        raise AssertionError("all sums are split")

    def start_all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> Any:
        self._count += 1
        if self._late and self._count % 3 == 0:
            time.sleep(0.005)
        return self._inner.start_all_reduce(tensor, channel=channel)


def test_halves_do_not_mix_when_ranks_are_late(rank_pool: Pool) -> None:
    assert rank_pool(2).run(sums) == [[4.0**NUM_LAYERS * token for token in range(6)]] * 2
