"""Which layers each stage of a pipeline holds: every layer once, in order, so that the slowest stage is as fast as it
can be. Arithmetic on costs alone; knows no torch, no model and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np
import numpy.typing as npt

from fourfold.errors import ConfigError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """What every part of a model costs, in any unit of time that all share."""

    layers: tuple[float, ...]
    first: float = 0.0
    """What the first stage does besides its layers: the embedding."""
    last: float = 0.0
    """What the last stage does besides its layers: the head, and sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """What every part of a model takes, and what there is; in bytes."""

    layers: tuple[int, ...]
    """Weights, and the least cache that is worth having."""
    first: int
    last: int
    available: tuple[int, ...]
    """Of each stage's device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The part of a model that one rank of a pipeline holds."""

    layers: range
    """By their numbers in the whole model."""
    is_first: bool = True
    """Whether it holds the embedding."""
    is_last: bool = True
    """Whether it holds the last norm and the head, and samples."""


def stages(sizes: Sequence[int]) -> list[Stage]:
    """The stages of these numbers of layers, in order."""
    ends = list(accumulate(sizes))
    last = len(ends) - 1
    return [
        Stage(layers=range(end - size, end), is_first=index == 0, is_last=index == last)
        for index, (end, size) in enumerate(zip(ends, sizes))
    ]


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Raise ConfigError, with the sizes that would do, where there are more stages than layers."""
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but the model has {num_layers} layers; from 1 to {num_layers}"
        )


def check_sum(option: str, sizes: Sequence[int], num_layers: int) -> None:
    """Raise ConfigError, with sizes that would do, where the stages hold more or fewer layers than there are."""
    if sum(sizes) != num_layers:
        even = partition(StageCosts(layers=(1.0,) * num_layers), len(sizes))
        raise ConfigError(
            f"--pipeline-partition is {option!r}, which sums to {sum(sizes)}, and the model has {num_layers} layers; "
            f"{','.join(map(str, even))} would do"
        )


def partition(costs: StageCosts, num_stages: int, memory: StageMemory | None = None) -> tuple[int, ...]:
    """Layers of each stage, 1 or more: of the cuts whose slowest stage is fastest, an even one.

    Raises ConfigError for more stages than layers, and naming the stage whose ``memory`` does not suffice.
    """
    check_num_stages(num_stages, len(costs.layers))
    whole = _between(costs.layers, costs.first, costs.last)
    stage_costs = [whole] * num_stages
    if memory is not None:
        needed = _between(memory.layers, memory.first, memory.last)
        stage_costs = [np.where(needed <= free, whole, inf) for free in memory.available]
    bottleneck = _least_bottleneck(stage_costs)
    if bottleneck == inf:
        raise ConfigError(_shortage(stage_costs, memory))
    return _even_sizes(whole, stage_costs, bottleneck)


def _between(layers: Sequence[float], first: float, last: float) -> Floats:
    """[L + 1, L + 1]: what a stage from layer a to layer b (excluded) costs, ends' own share included; inf: a >= b."""
    values = np.array(layers, np.float64)
    values[0] += first
    values[-1] += last
    before = np.concatenate([[0.0], np.cumsum(values)])
    between: Floats = before[None, :] - before[:, None]
    between[np.tril_indices(len(before))] = inf
    return between


def _least_bottleneck(stage_costs: Sequence[Floats]) -> float:
    """The cost of the slowest stage of the best cut; inf where there is none."""
    best = np.full(len(stage_costs[0]), inf)  # of what lies before each layer, over the stages so far
    best[0] = 0.0
    for cost in stage_costs:
        best = np.maximum(best[:, None], cost).min(0)
    return float(best[-1])


def _even_sizes(whole: Floats, stage_costs: Sequence[Floats], limit: float) -> tuple[int, ...]:
    """Sizes of a cut without a stage above ``limit``; each stage takes its share of what is left, or nearly so."""
    size = len(stage_costs[0])
    finishes = [np.arange(size) == size - 1]  # whether the stages from here on can hold the layers from there on
    for cost in reversed(stage_costs[1:]):
        finishes.append((cost[:, finishes[-1]] <= limit).any(1))
    start, sizes = 0, []
    for stage, cost in enumerate(stage_costs):
        share = whole[start, -1] / (len(stage_costs) - stage)
        possible = finishes.pop() & (cost[start] <= limit)
        end = int(np.where(possible, np.abs(whole[start] - share), inf).argmin())
        sizes.append(end - start)
        start = end
    return tuple(sizes)


def _shortage(stage_costs: Sequence[Floats], memory: StageMemory | None) -> str:
    """Why there is no cut: the first stage at which what the earlier ones can hold comes to an end."""
    furthest, stage = 0, 0
    reached = np.arange(len(stage_costs[0])) == 0
    while reached.any():
        furthest = int(np.flatnonzero(reached)[-1])
        if stage == len(stage_costs) - 1:
            break
        reached = (stage_costs[stage][reached] < inf).any(0)
        stage += reached.any()
    available = 0 if memory is None else memory.available[stage]
    return (
        f"stage {stage} of {len(stage_costs)} has {available} bytes of memory, too little for the layers from "
        f"{furthest} on, which the stages before it cannot hold; raise --pipeline-parallel-size or "
        "--tensor-parallel-size, or lower --max-model-len"
    )
