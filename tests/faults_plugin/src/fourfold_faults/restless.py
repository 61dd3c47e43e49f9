"""The moe layer ``ep``, whose experts all move after each of the first steps, to where a random map has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fourfold.contracts.step_part import StepVote, TakeTurns
from fourfold.entries import ParallelLayerContext
from fourfold.errors import ConfigError
from fourfold_moe_ep.layer import ExpertParallelLayer
from fourfold_moe_ep.rebalancing import Rebalancing

MAPS: Final = 100
_KEY: Final = "restlessness"


class RestlessLayer(ExpertParallelLayer):
    """Needs ``--moe-ep-rebalance-interval``, far beyond the steps of the test."""

    def __init__(self, context: ParallelLayerContext) -> None:
        super().__init__(context)
        rebalancing, mixture = self._spread._rebalancing, context.mixture
        if rebalancing is None or mixture is None:
            raise ConfigError("restless experts need --moe-ep-rebalance-interval")
        if _KEY not in context.shared:
            context.shared[_KEY] = Restlessness(rebalancing, mixture.num_experts, self._spread.num_physical)


class Restlessness:
    """See ``fourfold.contracts.step_part.StepPart``."""

    def __init__(self, rebalancing: Rebalancing, num_experts: int, num_physical: int) -> None:
        self._rebalancing = rebalancing
        self._num_experts = num_experts
        self._num_physical = num_physical
        self._generator = np.random.default_rng(0)
        self._num_maps = 0

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        return vote

    def take_turns(self, num_tokens: int) -> TakeTurns | None:
        return None

    def end_step(self) -> None:
        if self._num_maps == MAPS:
            return
        self._num_maps += 1
        self._rebalancing.start(np.stack([self._random_row() for _ in range(self._rebalancing.num_layers)]))
        while self._rebalancing.moving:
            self._rebalancing.end_step()

    def counters(self) -> Mapping[str, float]:
        return {"random_maps": float(self._num_maps)}

    def report(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def _random_row(self) -> NDArray[np.int32]:
        """Every expert once at least, anywhere."""
        more = self._generator.integers(0, self._num_experts, self._num_physical - self._num_experts)
        return self._generator.permutation(np.concatenate([np.arange(self._num_experts), more])).astype(np.int32)
