"""Asks a rebalancer where experts should be. It is somebody else's: it may raise, be wrong, or never return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fourfold.errors import EngineError
from fourfold_moe_ep.expert_copies import map_of
from fourfold_moe_ep.expert_moves import spread_places

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fourfold.contracts.mixture import Rebalancer

PLAN_SECONDS: Final = 10.0
"""For one answer, in which the engines stand still; less where ranks wait less for each other."""

log = logging.getLogger(__name__)


class Planner:
    """On one rank, for all."""

    def __init__(
        self, rebalancer: Rebalancer, owners: Sequence[int], num_ranks: int, *, seconds: float = PLAN_SECONDS
    ) -> None:
        """``owners`` is the rank of each physical expert; ``seconds`` is how long an answer may take."""
        self._rebalancer = rebalancer
        self._owners = list(owners)
        self._num_ranks = num_ranks
        self._seconds = seconds
        self._asked: threading.Thread | None = None

    def plan(self, load: NDArray[np.float64]) -> NDArray[np.int32] | None:
        """``load`` [L, E] -> the logical expert of each physical one, [L, P]; None, with a warning, where the answer is
        late or cannot be. A rebalancer that has not returned is not asked again.
        """
        if self._asked is not None and self._asked.is_alive():
            log.warning("experts stay where they are: the rebalancer has not answered yet what it was asked before")
            return None
        answers: list[NDArray[np.int32] | Exception] = []
        self._asked = threading.Thread(target=self._ask, args=(load.copy(), answers), name="rebalancer", daemon=True)
        self._asked.start()
        self._asked.join(self._seconds)
        answer = answers[0] if answers else EngineError(f"no answer within {self._seconds:g} s")
        if isinstance(answer, Exception):
            log.warning("experts stay where they are: the rebalancer failed: %s: %s", type(answer).__name__, answer)
            return None
        return answer

    def _ask(self, load: NDArray[np.float64], answers: list[NDArray[np.int32] | Exception]) -> None:
        try:
            answers.append(self._placed(load))
        except Exception as error:  # whatever it is, the experts are fine where they are
            answers.append(error)

    def _placed(self, load: NDArray[np.float64]) -> NDArray[np.int32]:
        """The rebalancer's map, in the order in which ``owners`` places experts; raises where it is none."""
        num_experts, shape = load.shape[1], (len(load), len(self._owners))
        balanced = self._rebalancer.balance(load, self._num_ranks, len(self._owners))
        found = np.asarray(balanced.physical_to_logical)
        if found.shape != shape or found.dtype.kind not in "iu":
            raise EngineError(f"its map is {found.dtype} {list(found.shape)}, not integers {list(shape)}")
        if found.min() < 0 or found.max() >= num_experts:
            raise EngineError(f"its map names experts from {found.min()} to {found.max()}, of {num_experts}")
        map_of(found, num_experts)  # refuses one without a copy of some expert
        return spread_places(found.astype(np.int32), self._owners)
