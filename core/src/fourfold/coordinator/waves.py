"""Waves: engines that share collectives step together or not at all. Pure state machines; know no socket and no clock.

A wave is an epoch: the coordinator starts it on all ranks, and every step of it is one collective of all ranks, which
also reduces a ``StepVote``. All ranks see the same result, so that all leave the wave after the same step, in which
nobody had work, and all pause after the same step, in which each was asked to and had nothing left to finish. A pause
is the ranks' own: whoever is asked to pause asks for a wave, to agree in it; a coordinator that is another one than
before has nothing to remember. The coordinator believes only what it has been told: its state changes when the last
rank has said so. Messages between it and a rank must arrive in order; nothing else is assumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import msgspec

from fourfold.contracts.step_part import StepVote
from fourfold.errors import EngineError

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests at a pause: they end, they are finished first, or they stay as they are."""


class WaveState(StrEnum):
    """What a rank does, or the group of ranks as the coordinator has been told: that is idle or running."""

    IDLE = "idle"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"


# --- coordinator -> rank -----------------------------------------------------------------------------------------


class StartWave(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Step until all agree to stop."""

    epoch: int


RankInput = StartWave


# --- rank -> coordinator -----------------------------------------------------------------------------------------


class WorkArrived(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """A rank that is in no wave has something to do."""

    rank: int


class WaveLeft(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """The rank has left the wave, as all have."""

    rank: int
    epoch: int
    has_work: bool
    """Whether something is left or has come meanwhile."""


CoordinatorNotice = WorkArrived | WaveLeft


class WaveRank:
    """One rank. Whoever drives it delivers messages between two steps, and reports what the votes came to."""

    def __init__(self, rank: int, send: Callable[[CoordinatorNotice], None], *, paused: bool = False) -> None:
        self._rank = rank
        self._send = send
        self._epoch: int | None = None
        self._coming: deque[int] = deque()
        self._announced = False
        self._pausing = False
        self._paused = paused

    @property
    def epoch(self) -> int | None:
        """The wave that the rank is in, paused or not."""
        return self._epoch

    @property
    def state(self) -> WaveState:
        """PAUSING until all ranks have agreed in a step."""
        if self._paused or self._pausing:
            return WaveState.PAUSED if self._paused else WaveState.PAUSING
        return WaveState.IDLE if self._epoch is None else WaveState.RUNNING

    @property
    def steps(self) -> bool:
        """Whether the next step is due, and the others wait for it."""
        return self._epoch is not None and not self._paused

    def work_arrived(self, *, again: bool = False) -> None:
        """The rank has something to do. Say it once, or each time; ``again``: the coordinator may not have heard."""
        if self._epoch is None and not self._paused and (again or not self._announced):
            self._announced = True
            self._send(WorkArrived(rank=self._rank))

    def pause(self, *, again: bool = False) -> None:
        """Stop when all others are to, and nobody has work; until then every step is an offer.

        ``again``: where all have stopped already they go on until that is so, as after ``resume``.
        """
        if again:
            self._paused = False
        if not self._paused:
            self._pausing = True
            self.work_arrived()

    def resume(self) -> None:
        """Go on where all have stopped, or give the pause up. All ranks must, before long: who goes on first waits."""
        self._pausing = self._paused = False

    def receive(self, message: RankInput) -> None:
        """Hear the coordinator. A wave that begins in a pause waits for its end, and one that begins in another, of a
        coordinator that did not know of that, comes after it.
        """
        self._coming.append(message.epoch)
        self._begin()

    def _begin(self) -> None:
        if self._epoch is None and self._coming:
            self._epoch, self._announced = self._coming.popleft(), False

    def vote(self, *, has_work: bool) -> StepVote:
        """The vote for the next step. ``has_work``: whether anything runs, or is to begin; a pause waits for it."""
        return StepVote(has_work or self._pausing, self._pausing and not has_work)

    def step_done(self, reduced: StepVote, *, has_work: bool) -> None:
        """Hear what the votes of a step came to. ``has_work``: whether anything is left, or has come by now."""
        if self._epoch is None:
            raise EngineError(f"rank {self._rank} stepped outside a wave")
        if reduced.may_pause:
            self._pausing, self._paused = False, True
        elif not reduced.has_work:
            epoch, self._epoch = self._epoch, None
            self._announced = has_work
            self._send(WaveLeft(rank=self._rank, epoch=epoch, has_work=has_work))
            self._begin()


class WaveCoordinator:
    """The one who starts waves. ``send`` delivers to a rank; what it hears comes by ``receive``."""

    def __init__(self, num_ranks: int, send: Callable[[int, RankInput], None], *, last_epoch: int = 0) -> None:
        """``last_epoch``: no smaller than any of a coordinator before this one."""
        self._num_ranks = num_ranks
        self._send = send
        self.epoch = last_epoch
        """Of the last wave that was started."""
        self._in_wave: set[int] = set()
        """Ranks that have been told to start and have not said that they left."""
        self._wanted = False
        """Whether some rank has work that no wave has taken on."""

    @property
    def state(self) -> WaveState:
        """RUNNING until the last rank has left the wave."""
        return WaveState.RUNNING if self._in_wave else WaveState.IDLE

    def receive(self, message: CoordinatorNotice) -> None:
        """Hear a rank."""
        match message:
            case WorkArrived():
                self._wanted = True
            case WaveLeft():
                if message.epoch == self.epoch:
                    self._in_wave.discard(message.rank)
                self._wanted |= message.has_work
        if self._wanted and not self._in_wave:
            self._wanted = False
            self.epoch += 1
            self._in_wave = set(range(self._num_ranks))
            for rank in range(self._num_ranks):
                self._send(rank, StartWave(epoch=self.epoch))
