"""Microbatches in virtual time: a processor that they share, and a link that works beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fourfold.errors import EngineError
from fourfold_moe_ep.microbatch import GreenletTurns, MicrobatchContext, ThreadTurns, TwinFailed

TURNS = [GreenletTurns, ThreadTurns]
NUM_LAYERS = 8
SHAPES = [(4, 4, 4, 4), (2, 6, 2, 6), (6, 2, 6, 2), (8, 4, 4, 4), (4, 1, 4, 1), (1, 10, 1, 10)]
"""Of one microbatch in one layer: attention, dispatch, experts, combine."""


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._link = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def send(self, seconds: float) -> float:
        """Returns when it will have arrived."""
        self._link = max(self._link, self.now) + seconds
        return self._link

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def layers(
    clock: Clock, shape: Sequence[float], hand_over: Callable[[MicrobatchContext], None]
) -> Callable[[MicrobatchContext], float]:
    attention, dispatch, experts, combine = shape

    def body(context: MicrobatchContext) -> float:
        for _ in range(NUM_LAYERS):
            for compute, travel in ((attention, dispatch), (experts, combine)):
                clock.compute(compute)
                arrived = clock.send(travel)
                hand_over(context)
                clock.wait(arrived)
        return clock.now

    return body


def event_model(shape: Sequence[float]) -> float:
    """The same by hand: each half layer of each microbatch computes when the processor and its tokens are there."""
    attention, dispatch, experts, combine = shape
    processor = link = 0.0
    there = [0.0, 0.0]
    for _ in range(NUM_LAYERS):
        for compute, travel in ((attention, dispatch), (experts, combine)):
            for one in range(2):
                processor = max(processor, there[one]) + compute
                link = max(link, processor) + travel
                there[one] = link
    return max(there)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_makespan_is_that_of_the_event_model(turns: type[Any], shape: Sequence[float]) -> None:
    clock = Clock()
    ends = turns().run([layers(clock, shape, lambda context: context.yield_to_other())] * 2)
    assert clock.now == max(ends) == event_model(shape)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_hand_overs_it_is_the_serial_time(turns: type[Any], shape: Sequence[float]) -> None:
    clock = Clock()
    turns().run([layers(clock, shape, lambda context: None)] * 2)
    assert clock.now == 2 * NUM_LAYERS * sum(shape)


def test_equal_compute_and_link_take_little_more_than_half() -> None:
    clock = Clock()
    GreenletTurns().run([layers(clock, (4, 4, 4, 4), lambda context: context.yield_to_other())] * 2)
    assert 2 * NUM_LAYERS * 16 / clock.now > 1.9


@pytest.mark.parametrize("turns", TURNS)
def test_they_take_turns_and_the_longer_one_ends_alone(turns: type[Any]) -> None:
    trace: list[str] = []

    def body(count: int) -> Callable[[MicrobatchContext], int]:
        def run(context: MicrobatchContext) -> int:
            for number in range(count):
                trace.append(f"{context.index}.{number}")
                context.yield_to_other()
            return count

        return run

    assert turns().run([body(2), body(4)]) == [2, 4]
    assert trace == ["0.0", "1.0", "0.1", "1.1", "1.2", "1.3"]


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("after", [0, 2])
def test_one_that_raises_is_named_and_its_twin_is_released(turns: type[Any], failing: int, after: int) -> None:
    released: list[int] = []

    def run(context: MicrobatchContext) -> None:
        try:
            for number in range(5):
                if context.index == failing and number == after:
                    raise ValueError("boom")
                context.yield_to_other()
        except TwinFailed:
            released.append(context.index)
            raise

    with pytest.raises(EngineError, match=f"microbatch {failing} failed: ValueError: boom") as error:
        turns().run([run, run])
    assert isinstance(error.value.__cause__, ValueError)
    begun = failing == 1 or after > 0
    assert released == ([1 - failing] if begun else [])


@pytest.mark.parametrize("turns", TURNS)
def test_the_first_failure_is_the_one_that_is_told(turns: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    def run(context: MicrobatchContext) -> None:
        try:
            context.yield_to_other()
            if context.index == 0:
                raise ValueError("boom")
            context.yield_to_other()
        except TwinFailed:
            raise RuntimeError("cannot clean up") from None

    with pytest.raises(EngineError, match="microbatch 0 failed: ValueError: boom"):
        turns().run([run, run])
