"""Moves experts between steps, layer by layer, each as a transaction: all ranks take a layer's new map, or none does.

A layer's map changes only here, between two steps, on all ranks alike: what decides are loads that all have added up,
and the plan of the first rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fourfold.errors import FourfoldError
from fourfold_moe_ep.expert_copies import map_of
from fourfold_moe_ep.expert_moves import moves_of, settle
from fourfold_moe_ep.planner import PLAN_SECONDS, Planner
from fourfold_moe_ep.rebalancer import balancedness, rank_loads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.mixture import ExpertMap, Rebalancer
    from fourfold_moe_ep.expert_moves import Move
    from fourfold_moe_ep.held_experts import HeldExperts

_MIXTURE_SHARE: Final = 0.5
"""Of a step that the slowest rank's experts are taken to be."""
_BYTES_PER_SECOND: Final = 1e9
"""At which experts are taken to move: what shared memory gives on a busy CPU, a third of a percent of NVLink."""

log = logging.getLogger(__name__)


def pays(*, before: float, after: float, least_gain: float, seconds: float, nbytes: float) -> bool:
    """Whether it is worth to move ``nbytes`` for balancedness ``after`` in place of ``before``, if the next ``seconds``
    of steps are like the last ones.
    """
    saved = seconds * _MIXTURE_SHARE * (1.0 - before / after)
    return after - before >= least_gain and saved > nbytes / _BYTES_PER_SECOND


class Rebalancing:
    """Of all layers of one decoder, on one rank."""

    def __init__(
        self,
        held: Sequence[HeldExperts],
        rebalancer: Rebalancer,
        communicator: Communicator | None,
        owners: Sequence[int],
        *,
        interval: int,
        least_gain: float,
        repeats: int = 1,
        plan_seconds: float = PLAN_SECONDS,
    ) -> None:
        """``held`` is one a layer, and may grow until the first step; ``owners`` is the rank of each physical expert;
        ``interval`` counts steps; ``repeats`` is how many ranks count the same token; ``plan_seconds`` is how long the
        rebalancer may think, while all ranks wait.
        """
        self._held = held
        self._communicator = communicator
        self._owners = list(owners)
        self._world_size = 1 if communicator is None else communicator.world_size
        self._rank = 0 if communicator is None else communicator.rank
        self._planner = Planner(rebalancer, owners, self._world_size, seconds=plan_seconds)
        self._interval = interval
        self._least_gain = least_gain
        self._repeats = repeats
        self._steps = 0
        self._window_started = time.perf_counter()
        self._last_load: NDArray[np.float64] | None = None
        """[L, E] tokens, in the last whole window."""
        self._last_window = self._window_step = 0
        """Its steps, and the step after which the present one began."""
        self._pending: list[tuple[int, NDArray[np.int32]]] = []
        """Layers that are to change, and their maps."""
        self.counters: dict[str, float] = {
            "expert_balancedness": 1.0,
            "expert_rebalances": 0.0,
            "expert_rebalance_failures": 0.0,
            "expert_moves": 0.0,
            "expert_move_failures": 0.0,
        }

    @property
    def num_layers(self) -> int:
        """Whose experts may move."""
        return len(self._held)

    @property
    def moving(self) -> bool:
        """Whether some layer is still to change."""
        return bool(self._pending)

    def end_step(self) -> None:
        """Count a step; move the experts of one layer, if any are to move."""
        self._steps += 1
        if self._pending:
            self._change(*self._pending.pop(0))
        elif self._steps % self._interval == 0:
            self._consider()

    def report(self) -> Mapping[str, Any] | None:
        """How often each expert was asked for in the last window, on all ranks together, and what that is for the ranks
        as the experts lie now; None before the end of the first window.
        """
        load = self._last_load
        if load is None:
            return None
        current = self._current_map(load.shape[1])
        return {
            "window_steps": self._last_window,
            "load": load.astype(np.int64).tolist(),
            "rank_load": rank_loads(load, current, self._owners, self._world_size).round(1).tolist(),
            "balancedness": round(balancedness(load, current, self._owners, self._world_size), 4),
        }

    def start(self, maps: NDArray[np.int32]) -> None:
        """Begin to change to ``maps`` [L, P], one layer after each step; the same on all ranks."""
        new = [settle(row, held.logical, self._owners) for row, held in zip(maps, self._held)]
        self._pending = [(layer, row) for layer, row in enumerate(new) if (row != self._held[layer].logical).any()]

    def _consider(self) -> None:
        load, seconds = self._take_load()
        self._last_load = load
        current = self._current_map(load.shape[1])
        now = balancedness(load, current, self._owners, self._world_size)
        self.counters["expert_balancedness"] = now
        if not load.any():
            return
        new = self._plan(load)
        if new is None:
            self.counters["expert_rebalance_failures"] += 1
            return
        then = balancedness(load, map_of(new, load.shape[1]), self._owners, self._world_size)
        settled = np.stack([settle(row, held.logical, self._owners) for row, held in zip(new, self._held)])
        nbytes = self._held[0].nbytes * int((settled != current.physical_to_logical).sum())
        if pays(before=now, after=then, least_gain=self._least_gain, seconds=seconds, nbytes=nbytes):
            log.info("experts move for a balancedness of %.3f in place of %.3f", then, now)
            self.counters["expert_rebalances"] += 1
            self.start(settled)

    def _plan(self, load: NDArray[np.float64]) -> NDArray[np.int32] | None:
        """Where experts should be, [L, P], as the first rank says to all; None: where they are."""
        found = self._planner.plan(load) if self._rank == 0 else None
        if self._communicator is None:
            return found
        told = np.full((len(load), len(self._owners)), -1, np.int32) if found is None else found
        said = self._communicator.broadcast(torch.from_numpy(told).to(self._held[0].device)).cpu().numpy()
        return None if (said < 0).any() else said

    def _current_map(self, num_experts: int) -> ExpertMap:
        return map_of(np.stack([held.logical for held in self._held]), num_experts)

    def _take_load(self) -> tuple[NDArray[np.float64], float]:
        """[L, E] tokens of all ranks since the last time, and the seconds that the window took, the same on all."""
        now = time.perf_counter()
        window, self._window_started = now - self._window_started, now
        self._last_window, self._window_step = self._steps - self._window_step, self._steps
        counts = torch.stack([held.take_load() for held in self._held]).double()
        both = torch.cat([counts.flatten(), counts.new_tensor([window])])
        if self._communicator is not None:
            both = self._communicator.all_reduce(both)
        numbers = both.cpu().numpy()
        return numbers[:-1].reshape(counts.shape) / self._repeats, float(numbers[-1]) / self._world_size

    def _change(self, layer: int, new: NDArray[np.int32]) -> None:
        """One layer's transaction."""
        held = self._held[layer]
        moves = moves_of(held.logical, new, self._owners)
        rows = self._prepare(held, moves)
        if self._all_agree(rows is not None) and rows is not None:
            for place, matrices in self._transfer(rows, moves).items():
                held.write(place, matrices)
            held.set_map(new)
            self.counters["expert_moves"] += len(moves)
        else:
            self.counters["expert_move_failures"] += 1
            log.warning("the experts of moe layer %d stay where they are: a rank could not move its own", layer)

    def _prepare(self, held: HeldExperts, moves: Sequence[Move]) -> torch.Tensor | None:
        """The experts that leave this rank, in the order in which they are sent; None if one cannot be read."""
        leaving = self._leaving(moves)
        try:
            rows = held.new_rows(len(leaving))
            for row, move in zip(rows, leaving):
                held.read_into(row, move.source)
        except (FourfoldError, RuntimeError) as error:  # of memory, or an expert that cannot be read
            log.warning("an expert cannot leave rank %d: %s", self._rank, error)
            return None
        return rows

    def _transfer(self, rows: torch.Tensor, moves: Sequence[Move]) -> Mapping[int, torch.Tensor]:
        """What ``_prepare`` gave, on every rank -> this rank's places, and what they will hold."""
        owners = self._owners
        coming = sorted((m for m in moves if owners[m.place] == self._rank), key=lambda m: (owners[m.source], m.place))
        if self._communicator is not None:
            leaving, ranks = self._leaving(moves), range(self._world_size)
            send = [sum(owners[move.place] == peer for move in leaving) for peer in ranks]
            receive = [sum(owners[move.source] == peer for move in coming) for peer in ranks]
            rows = self._communicator.all_to_all(rows, send_sizes=send, receive_sizes=receive)
        return dict(zip([move.place for move in coming], rows))

    def _leaving(self, moves: Sequence[Move]) -> list[Move]:
        """Those whose expert is on this rank, receiver by receiver."""
        owners = self._owners
        return sorted((m for m in moves if owners[m.source] == self._rank), key=lambda m: (owners[m.place], m.place))

    def _all_agree(self, vote: bool) -> bool:
        if self._communicator is None:
            return vote
        votes = self._communicator.all_reduce(torch.tensor([int(vote)], device=self._held[0].device))
        return int(votes) == self._world_size
