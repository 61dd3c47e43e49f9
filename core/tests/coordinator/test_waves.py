"""Explores random interleavings: every rank enters the same steps, none sleeps on work, and all pause or none does."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from fourfold.contracts.step_part import StepVote
from fourfold.coordinator.waves import (
    CoordinatorNotice,
    PauseMode,
    RankInput,
    StartWave,
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
    calls: deque[PauseMode | None] = field(default_factory=deque)
    """Of an operator: a pause, or None to go on."""
    mode: PauseMode | None = None
    unanswered: bool = False
    step: tuple[int, int] | None = None
    vote: StepVote | None = None
    steps_done: int = 0
    last_epoch: int = 0

    @property
    def has_work(self) -> bool:
        if self.mode is None:
            return bool(self.waiting or self.running)
        return self.mode == "wait" and bool(self.running)


class World:
    """All ranks, the coordinator, an operator, and the messages on their way, in order on each channel alone."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_ranks = num_ranks
        self.to_ranks: list[deque[RankInput]] = [deque() for _ in range(num_ranks)]
        self.to_coordinator: list[deque[CoordinatorNotice]] = [deque() for _ in range(num_ranks)]
        self.engines = [Engine(WaveRank(rank, self.to_coordinator[rank].append)) for rank in range(num_ranks)]
        self.answers: set[int] = set()
        """Ranks that have answered the operator's last call."""
        self.wish: PauseMode | None = None
        self.results: dict[tuple[int, int], StepVote] = {}
        self.left: Counter[tuple[int, int]] = Counter()
        self.finished = self.aborted = self.added = 0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Another one than before, which knows nothing but what is on its way."""
        self.coordinator = WaveCoordinator(
            self.num_ranks, lambda rank, message: self.to_ranks[rank].append(message), last_epoch=self.epoch
        )

    @property
    def epoch(self) -> int:
        return self.coordinator.epoch if hasattr(self, "coordinator") else 0

    # --- what can happen ---------------------------------------------------------------------------------------------

    def request(self) -> None:
        engine = self.random.choice(self.engines)
        engine.waiting.append(self.random.randint(1, 4))
        self.added += 1
        if engine.step is None and engine.has_work:
            engine.wave.work_arrived()

    def operate(self, wish: PauseMode | None) -> None:
        """Call all ranks, once they have answered; a pause that is not reached may be given up."""
        if wish is not None and (self.wish is not None or len(self.answers) < self.num_ranks):
            return
        self.wish, self.answers = wish, set()
        for engine in self.engines:
            engine.calls.append(wish)

    def take_call(self, rank: int) -> None:
        engine = self.engines[rank]
        engine.mode = engine.calls.popleft()
        if engine.mode is None:
            engine.wave.resume()
            engine.unanswered = False
            if not engine.calls and self.wish is None:
                self.answers.add(rank)
            if engine.has_work:
                engine.wave.work_arrived()
            return
        if engine.mode == "abort":
            self.aborted += len(engine.running) + len(engine.waiting)
            engine.running.clear()
            engine.waiting.clear()
        engine.unanswered = True
        engine.wave.pause()
        self.answer(rank)

    def answer(self, rank: int) -> None:
        engine = self.engines[rank]
        if engine.wave.state is WaveState.PAUSED and engine.unanswered:
            engine.unanswered = False
            if not engine.calls:
                self.answers.add(rank)

    def enter(self, rank: int) -> None:
        """Begin the next step of the wave; the collective is complete when all are in it."""
        engine = self.engines[rank]
        epoch = engine.wave.epoch
        assert epoch is not None
        if epoch != engine.last_epoch:
            engine.last_epoch, engine.steps_done = epoch, 0
        if engine.mode is None:
            engine.running += engine.waiting
            engine.waiting.clear()
        engine.step = (epoch, engine.steps_done)
        engine.vote = engine.wave.vote(has_work=engine.has_work)
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
        if engine.mode is None or engine.mode == "wait":
            engine.running = [steps - 1 for steps in engine.running]
            self.finished += engine.running.count(0)
            engine.running = [steps for steps in engine.running if steps]
        engine.wave.step_done(self.results[step], has_work=engine.has_work)
        self.answer(rank)

    # --- exploring ---------------------------------------------------------------------------------------------------

    def moves(self) -> list[tuple[str, int]]:
        """What the machines could do now."""
        found = [("hear", rank) for rank, channel in enumerate(self.to_coordinator) if channel]
        for rank, engine in enumerate(self.engines):
            if engine.step is not None:
                if engine.step in self.results:
                    found.append(("leave", rank))
                continue
            if engine.calls:
                found.append(("call", rank))
            if self.to_ranks[rank]:
                found.append(("deliver", rank))
            if engine.wave.steps:
                found.append(("enter", rank))
        return found

    def make(self, move: tuple[str, int]) -> None:
        kind, rank = move
        if kind == "hear":
            self.coordinator.receive(self.to_coordinator[rank].popleft())
        elif kind == "deliver":
            self.engines[rank].wave.receive(self.to_ranks[rank].popleft())
        elif kind == "call":
            self.take_call(rank)
        elif kind == "enter":
            self.enter(rank)
        else:
            self.leave(rank)
        if self.is_paused:
            assert all(engine.step is None and not engine.wave.steps for engine in self.engines), "a step in a pause"

    @property
    def is_paused(self) -> bool:
        """Whether the operator has been told so."""
        return self.wish is not None and len(self.answers) == self.num_ranks

    def explore(self, num_events: int) -> None:
        self.answers = set(range(self.num_ranks))
        for _ in range(num_events):
            draw = self.random.random()
            if draw < 0.08:
                self.request()
            elif draw < 0.11:
                self.operate(self.random.choice(MODES))
            elif draw < 0.16 and (self.is_paused or (self.wish is not None and draw < 0.12)):
                self.operate(None)
            elif draw > 0.99:
                self.start_coordinator()
            else:
                moves = self.moves()
                if moves:
                    self.make(self.random.choice(moves))

    def settle(self) -> None:
        """Let everything happen, at last what a rank says again because nothing has come of it."""
        for _ in range(20_000):
            moves = self.moves()
            if not moves and not self.remind():
                return
            if moves:
                self.make(self.random.choice(moves))
        raise AssertionError(f"never quiet: {[engine.wave.state for engine in self.engines]}")

    def remind(self) -> bool:
        for engine in self.engines:
            if engine.step is None and (engine.has_work or engine.unanswered):
                engine.wave.work_arrived(again=True)
        return any(self.to_coordinator)


def explore(seed: int) -> None:
    world = World(num_ranks=2 + seed % 3, seed=seed)
    world.explore(300)
    world.settle()
    assert not any(engine.step for engine in world.engines), "a rank waits in a step for others"
    if world.wish is not None:
        assert world.is_paused, "a pause that is never reached"
        world.operate(None)
        world.settle()
    assert {engine.wave.state for engine in world.engines} == {WaveState.IDLE}
    assert not any(engine.has_work for engine in world.engines), "work waits and everyone sleeps"
    assert world.added == world.finished + world.aborted
    assert set(world.left.values()) <= {len(world.engines)}, "a step that only some have made"
    assert set(world.left) == set(world.results)


def test_every_rank_enters_the_same_steps_and_none_sleeps_on_work() -> None:
    for seed in range(200):
        explore(seed)


@pytest.mark.long
def test_five_thousand_interleavings() -> None:
    for seed in range(200, 5200):
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
    world.answers = {0, 1, 2}
    engine = world.engines[1]
    engine.waiting.extend([50, 50])
    world.added = 2
    engine.wave.work_arrived()
    while not engine.running or engine.running[0] > 48:
        world.make(world.random.choice(world.moves()))
    world.operate(mode)
    while engine.calls:
        world.make(world.random.choice(world.moves()))
    engine.waiting.append(3)
    world.settle()
    assert world.is_paused
    assert (world.finished, world.aborted > 0) == {"abort": (0, True), "wait": (2, False), "keep": (0, False)}[mode]
    assert bool(engine.running) == (mode == "keep")
    assert list(engine.waiting) == [3]
    world.operate(None)
    world.settle()
    assert {one.wave.state for one in world.engines} == {WaveState.IDLE}
    assert not engine.has_work


def test_a_pause_of_sleeping_ranks_needs_all_of_them() -> None:
    world = World(num_ranks=2, seed=3)
    world.engines[0].calls.append("keep")
    for _ in range(50):
        world.make(world.random.choice(world.moves()))
    assert world.engines[0].wave.state is WaveState.PAUSING
    world.engines[1].calls.append("keep")
    world.settle()
    assert {engine.wave.state for engine in world.engines} == {WaveState.PAUSED}
    steps = len(world.results)
    world.request()
    world.settle()
    assert len(world.results) == steps, "nothing starts during a pause"
    for engine in world.engines:
        engine.calls.append(None)
    world.settle()
    assert world.finished == 1


def test_ranks_that_start_paused_go_on_together() -> None:
    world = World(num_ranks=2, seed=4)
    for rank, engine in enumerate(world.engines):
        engine.wave = WaveRank(rank, world.to_coordinator[rank].append, paused=True)
        engine.mode = "keep"
    world.request()
    assert world.moves() == []
    world.engines[0].calls.append(None)
    world.engines[1].calls.append(None)
    world.settle()
    assert world.finished == 1


def test_a_wave_of_a_new_coordinator_comes_after_the_one_that_it_did_not_know_of() -> None:
    world = World(num_ranks=2, seed=5)
    wave = world.engines[0].wave
    for epoch in (1, 2):
        wave.receive(StartWave(epoch=epoch))
    assert wave.epoch == 1
    wave.step_done(StepVote(False, False), has_work=False)
    assert wave.epoch == 2
    wave.step_done(StepVote(False, False), has_work=False)
    assert wave.epoch is None
    with pytest.raises(EngineError, match="outside a wave"):
        wave.step_done(StepVote(True, False), has_work=True)
