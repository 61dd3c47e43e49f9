"""Waves: engines that share collectives step together or not at all. Pure state machines; know no socket and no clock.

A wave is an epoch: the coordinator starts it on all ranks, and every step of it is one collective of all ranks, which
also reduces a ``StepVote``. All ranks see the same result, so that all leave the wave after the same step: when nobody
has work, or when all have agreed to pause. The coordinator believes only what it has been told: its state changes
when the last rank has said so. Messages between it and a rank must arrive in order; nothing else is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import msgspec

from fourfold.contracts.step_part import StepVote
from fourfold.errors import EngineError

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests at a pause: they end, they are finished first, or they stay as they are."""


class WaveState(StrEnum):
    """What the group of ranks does, as the coordinator has been told."""

    IDLE = "idle"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"


# --- coordinator -> rank -----------------------------------------------------------------------------------------


class StartWave(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Step until all agree to stop."""

    epoch: int


class PauseWaves(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Leave the wave together; begin nothing new."""

    pause: int
    """The number of this pause."""
    mode: PauseMode


class ResumeWaves(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Requests may begin again."""

    pause: int


RankInput = StartWave | PauseWaves | ResumeWaves


# --- rank -> coordinator -----------------------------------------------------------------------------------------


class WorkArrived(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """A rank that is in no wave has something to do."""

    rank: int


class WaveStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The rank is in the wave."""

    rank: int
    epoch: int


class WaveLeft(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """The rank has left the wave, as all have."""

    rank: int
    epoch: int
    has_work: bool
    """Whether something is left or has come meanwhile."""


class RankPaused(msgspec.Struct, frozen=True, kw_only=True, tag="paused"):
    """The rank is in no wave, and knows of the pause."""

    rank: int
    pause: int


class RankResumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed"):
    """The rank knows that the pause is over."""

    rank: int
    pause: int


CoordinatorNotice = WorkArrived | WaveStarted | WaveLeft | RankPaused | RankResumed


class WaveRank:
    """One rank. Whoever drives it delivers messages between two steps, and reports what the votes came to."""

    def __init__(self, rank: int, send: Callable[[CoordinatorNotice], None]) -> None:
        self._rank = rank
        self._send = send
        self._epoch: int | None = None
        self._pause: PauseWaves | None = None
        self._paused = False
        self._announced = False

    @property
    def epoch(self) -> int | None:
        """The wave that the rank is in; None: it sleeps."""
        return self._epoch

    @property
    def pause(self) -> PauseMode | None:
        """While not None, requests that have not begun wait."""
        return None if self._pause is None else self._pause.mode

    def work_arrived(self, *, again: bool = False) -> None:
        """The rank has something to do. Say it once, or each time; ``again``: the coordinator may not have heard."""
        if self._epoch is None and (again or not self._announced):
            self._announced = True
            self._send(WorkArrived(rank=self._rank))

    def receive(self, message: RankInput) -> None:
        """Hear the coordinator."""
        match message:
            case StartWave():
                if self._epoch is not None or self._pause is not None:
                    raise EngineError(f"wave {message.epoch} starts on rank {self._rank}, which is not idle")
                self._epoch, self._announced = message.epoch, False
                self._send(WaveStarted(rank=self._rank, epoch=message.epoch))
            case PauseWaves():
                self._pause = message
                if self._epoch is None:
                    self._enter_pause()
            case ResumeWaves():
                self._pause, self._paused = None, False
                self._send(RankResumed(rank=self._rank, pause=message.pause))

    def vote(self, *, has_work: bool, has_begun: bool) -> StepVote:
        """The vote for the next step. ``has_begun``: whether a request runs that a pause of mode ``wait`` waits for."""
        if self._pause is None:
            return StepVote(has_work, False)
        return StepVote(has_work, self._pause.mode == "keep" or not has_begun)

    def step_done(self, reduced: StepVote, *, has_work: bool) -> bool:
        """Hear what the votes of a step came to; returns whether the wave goes on.

        ``has_work``: whether anything is left, or has come by now.
        """
        if self._epoch is None:
            raise EngineError(f"rank {self._rank} stepped outside a wave")
        if reduced.has_work and not reduced.may_pause:
            return True
        epoch, self._epoch = self._epoch, None
        self._announced = has_work
        self._send(WaveLeft(rank=self._rank, epoch=epoch, has_work=has_work))
        if self._pause is not None:
            self._enter_pause()
        return False

    def _enter_pause(self) -> None:
        if self._pause is not None and not self._paused:
            self._paused = True
            self._send(RankPaused(rank=self._rank, pause=self._pause.pause))


class WaveCoordinator:
    """The one who starts waves. ``send`` delivers to a rank; what it hears comes by ``receive``."""

    def __init__(self, num_ranks: int, send: Callable[[int, RankInput], None]) -> None:
        self._num_ranks = num_ranks
        self._send = send
        self.state = WaveState.IDLE
        self.epoch = 0
        """Waves started so far."""
        self._in_wave: set[int] = set()
        """Ranks that have been told to start and have not said that they left."""
        self._wanted = False
        """Whether some rank has work that no wave has taken on."""
        self._pauses = 0
        self._paused: set[int] = set()
        self._resuming: set[int] = set()
        """Ranks that have yet to hear of the end of the last pause."""
        self._resume_wanted = False

    def pause(self, mode: PauseMode) -> None:
        """Bring all ranks to a stop; ``state`` is PAUSED once all are. During a pause, nothing happens.

        Raises EngineError while ranks are still being told of the end of the last one.
        """
        if self._resuming or self._resume_wanted:
            raise EngineError("the engines are being resumed; pause them when that is over")
        if self.state in (WaveState.PAUSING, WaveState.PAUSED):
            return
        self.state = WaveState.PAUSING
        self._pauses += 1
        self._paused = set()
        self._tell_all(PauseWaves(pause=self._pauses, mode=mode))

    def resume(self) -> None:
        """End a pause, once it has been reached; without one, nothing happens."""
        if self.state is WaveState.PAUSING:
            self._resume_wanted = True
        elif self.state is WaveState.PAUSED and not self._resuming:
            self._resume_wanted = False
            self._resuming = set(range(self._num_ranks))
            self._tell_all(ResumeWaves(pause=self._pauses))

    def receive(self, message: CoordinatorNotice) -> None:
        """Hear a rank."""
        match message:
            case WorkArrived():
                self._wanted = True
            case WaveStarted():
                pass
            case WaveLeft():
                self._in_wave.discard(message.rank)
                self._wanted |= message.has_work
                if not self._in_wave and self.state is WaveState.RUNNING:
                    self.state = WaveState.IDLE
            case RankPaused():
                self._paused.add(message.rank)
                if len(self._paused) == self._num_ranks and self.state is WaveState.PAUSING:
                    self.state = WaveState.PAUSED
                    if self._resume_wanted:
                        self.resume()
            case RankResumed():
                self._resuming.discard(message.rank)
                if not self._resuming and self.state is WaveState.PAUSED:
                    self.state = WaveState.IDLE
        self._start_if_wanted()

    def _start_if_wanted(self) -> None:
        if self._wanted and self.state is WaveState.IDLE and not self._in_wave:
            self._wanted = False
            self.epoch += 1
            self.state = WaveState.RUNNING
            self._in_wave = set(range(self._num_ranks))
            self._tell_all(StartWave(epoch=self.epoch))

    def _tell_all(self, message: RankInput) -> None:
        for rank in range(self._num_ranks):
            self._send(rank, message)
