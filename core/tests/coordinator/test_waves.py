"""Explores random interleavings: every rank enters the same steps, and none sleeps on work."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from fourfold.coordinator.waves import (
    CoordinatorNotice,
    PauseMode,
    RankInput,
    StepVote,
    WaveCoordinator,
    WaveRank,
    WaveState,
)
from fourfold.errors import EngineError

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@dataclass
class Engine:
    """Requests are the steps that they still need; a rank in a step waits until all ranks have entered it."""

    wave: WaveRank
    waiting: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)
    step: tuple[int, int] | None = None
    vote: StepVote | None = None
    steps_done: int = 0
    last_epoch: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)


class World:
    """All ranks, the coordinator, and the messages on their way, in order on each channel alone."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.to_ranks: list[deque[RankInput]] = [deque() for _ in range(num_ranks)]
        self.to_coordinator: list[deque[CoordinatorNotice]] = [deque() for _ in range(num_ranks)]
        self.coordinator = WaveCoordinator(num_ranks, lambda rank, message: self.to_ranks[rank].append(message))
        self.engines = [Engine(WaveRank(rank, self.to_coordinator[rank].append)) for rank in range(num_ranks)]
        self.results: dict[tuple[int, int], StepVote] = {}
        self.left: Counter[tuple[int, int]] = Counter()
        self.finished = self.aborted = self.added = 0

    # --- what can happen ---------------------------------------------------------------------------------------------

    def request(self) -> None:
        engine = self.random.choice(self.engines)
        engine.waiting.append(self.random.randint(1, 4))
        self.added += 1
        engine.wave.work_arrived()

    def deliver_to_rank(self, rank: int) -> None:
        engine = self.engines[rank]
        assert engine.step is None
        message = self.to_ranks[rank].popleft()
        engine.wave.receive(message)
        if engine.wave.pause == "abort":
            self.aborted += len(engine.running) + len(engine.waiting)
            engine.running.clear()
            engine.waiting.clear()

    def enter(self, rank: int) -> None:
        """Begin the next step of the wave; the collective is complete when all are in it."""
        engine = self.engines[rank]
        epoch = engine.wave.epoch
        assert epoch is not None
        if epoch != engine.last_epoch:
            engine.last_epoch, engine.steps_done = epoch, 0
        if engine.wave.pause is None:
            engine.running += engine.waiting
            engine.waiting.clear()
        engine.step = (epoch, engine.steps_done)
        engine.vote = engine.wave.vote(has_work=engine.has_work, has_begun=bool(engine.running))
        together = [other.step for other in self.engines if other.step is not None]
        assert all(step == engine.step or step in self.results for step in together), f"steps {together} at once"
        if len([step for step in together if step == engine.step]) == len(self.engines):
            votes = [other.vote for other in self.engines if other.vote is not None]
            reduced = votes[0]
            for vote in votes[1:]:
                reduced = reduced.reduce(vote)
            self.results[engine.step] = reduced

    def leave(self, rank: int) -> None:
        engine = self.engines[rank]
        assert engine.step is not None
        step, engine.step, engine.vote = engine.step, None, None
        self.left[step] += 1
        engine.steps_done += 1
        engine.running = [steps - 1 for steps in engine.running]
        self.finished += engine.running.count(0)
        engine.running = [steps for steps in engine.running if steps]
        engine.wave.step_done(self.results[step], has_work=engine.has_work)

    def pause(self) -> None:
        with contextlib.suppress(EngineError):  # it is being resumed
            self.coordinator.pause(self.random.choice(MODES))

    # --- exploring ---------------------------------------------------------------------------------------------------

    def moves(self) -> list[tuple[str, int]]:
        """What the machines could do now."""
        found = [("hear", rank) for rank, channel in enumerate(self.to_coordinator) if channel]
        for rank, engine in enumerate(self.engines):
            if engine.step is not None:
                if engine.step in self.results:
                    found.append(("leave", rank))
                continue
            if self.to_ranks[rank]:
                found.append(("deliver", rank))
            if engine.wave.epoch is not None:
                found.append(("enter", rank))
        return found

    def make(self, move: tuple[str, int]) -> None:
        kind, rank = move
        if kind == "hear":
            self.coordinator.receive(self.to_coordinator[rank].popleft())
        elif kind == "deliver":
            self.deliver_to_rank(rank)
        elif kind == "enter":
            self.enter(rank)
        else:
            self.leave(rank)
        self.check()

    def check(self) -> None:
        if self.coordinator.state is WaveState.PAUSED:
            assert all(engine.step is None and engine.wave.epoch is None for engine in self.engines)

    def explore(self, num_events: int) -> None:
        for _ in range(num_events):
            draw = self.random.random()
            if draw < 0.08:
                self.request()
            elif draw < 0.11:
                self.pause()
            elif draw < 0.16:
                self.coordinator.resume()
            else:
                moves = self.moves()
                if moves:
                    self.make(self.random.choice(moves))

    def settle(self) -> None:
        for _ in range(20_000):
            moves = self.moves()
            if not moves:
                return
            self.make(self.random.choice(moves))
        raise AssertionError(f"never quiet: {self.coordinator.state}")


def explore(seed: int) -> None:
    world = World(num_ranks=2 + seed % 3, seed=seed)
    world.explore(300)
    world.settle()
    assert not any(engine.step for engine in world.engines), "a rank waits in a step for others"
    if world.coordinator.state is WaveState.PAUSED:
        world.coordinator.resume()
        world.settle()
    assert world.coordinator.state is WaveState.IDLE
    assert not any(engine.has_work for engine in world.engines), "work waits and everyone sleeps"
    assert world.added == world.finished + world.aborted
    assert set(world.left.values()) <= {len(world.engines)}, "a step that only some have made"
    assert set(world.left) == set(world.results)


def test_every_rank_enters_the_same_steps_and_none_sleeps_on_work() -> None:
    for seed in range(500):
        explore(seed)


@pytest.mark.long
def test_five_thousand_interleavings() -> None:
    for seed in range(500, 5500):
        explore(seed)


def test_a_wave_goes_from_the_first_request_to_the_last() -> None:
    world = World(num_ranks=2, seed=1)
    assert world.moves() == []
    world.request()
    world.settle()
    assert (world.coordinator.epoch, world.coordinator.state) == (1, WaveState.IDLE)
    assert world.finished == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_a_pause_does_to_requests(mode: PauseMode) -> None:
    world = World(num_ranks=3, seed=2)
    engine = world.engines[1]
    engine.waiting.extend([50, 50])
    world.added = 2
    engine.wave.work_arrived()
    while not engine.running or engine.running[0] > 48:
        world.make(world.random.choice(world.moves()))
    world.coordinator.pause(mode)
    assert world.coordinator.state is WaveState.PAUSING
    engine.waiting.append(3)
    engine.wave.work_arrived()
    world.settle()
    assert world.coordinator.state is WaveState.PAUSED
    assert (world.finished, world.aborted > 0) == {"abort": (0, True), "wait": (2, False), "keep": (0, False)}[mode]
    assert bool(engine.running) == (mode == "keep")
    world.coordinator.resume()
    world.settle()
    assert world.coordinator.state is WaveState.IDLE
    assert not engine.has_work


def test_a_pause_of_sleeping_ranks_needs_all_of_them() -> None:
    world = World(num_ranks=2, seed=3)
    world.coordinator.pause("keep")
    world.deliver_to_rank(0)
    world.make(("hear", 0))
    assert world.coordinator.state is WaveState.PAUSING
    world.deliver_to_rank(1)
    world.make(("hear", 1))
    assert world.coordinator.state is WaveState.PAUSED
    world.request()
    world.settle()
    assert world.coordinator.epoch == 0, "nothing starts during a pause"
    world.coordinator.resume()
    with pytest.raises(EngineError, match="being resumed"):
        world.coordinator.pause("keep")
    world.settle()
    assert (world.coordinator.epoch, world.finished) == (1, 1)


def test_a_resume_before_the_pause_is_reached_is_not_forgotten() -> None:
    world = World(num_ranks=2, seed=4)
    world.request()
    world.coordinator.pause("wait")
    world.coordinator.resume()
    world.settle()
    assert (world.coordinator.state, world.finished) == (WaveState.IDLE, 1)


def test_a_rank_refuses_what_cannot_be() -> None:
    world = World(num_ranks=2, seed=5)
    world.request()
    world.make(("hear", next(rank for rank, channel in enumerate(world.to_coordinator) if channel)))
    start = world.to_ranks[0][0]
    world.deliver_to_rank(0)
    with pytest.raises(EngineError, match="not idle"):
        world.engines[0].wave.receive(start)
    with pytest.raises(EngineError, match="outside a wave"):
        world.engines[1].wave.step_done(StepVote(True, False), has_work=True)
