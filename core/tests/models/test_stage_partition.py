"""Cuts cover every layer once and in order, and no cut has a faster slowest stage."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from fourfold.errors import ConfigError
from fourfold.models.stage_partition import StageCosts, StageMemory, check_sum, partition, stages

Sums = list[float]


def uniform(num_layers: int, **ends: float) -> StageCosts:
    return StageCosts(layers=(1.0,) * num_layers, **ends)


def stage_sums(sizes: tuple[int, ...], layers: tuple[float, ...], first: float, last: float) -> Sums:
    return [
        sum(layers[layer] for layer in stage.layers) + first * stage.is_first + last * stage.is_last
        for stage in stages(sizes)
    ]


def test_every_size_is_covered_disjoint_and_in_order() -> None:
    for num_layers in range(1, 129):
        costs = uniform(num_layers, first=0.2, last=8.0)
        for num_stages in range(1, num_layers + 1):
            sizes = partition(costs, num_stages)
            held = [layer for stage in stages(sizes) for layer in stage.layers]
            assert held == list(range(num_layers))
            assert len(sizes) == num_stages
            assert min(sizes) > 0


def test_stages_know_their_ends() -> None:
    first, middle, last = stages((2, 1, 3))
    assert (first.is_first, first.is_last, first.layers) == (True, False, range(2))
    assert (middle.is_first, middle.is_last, middle.layers) == (False, False, range(2, 3))
    assert (last.is_first, last.is_last, last.layers) == (False, True, range(3, 6))
    (alone,) = stages((4,))
    assert alone.is_first
    assert alone.is_last


@pytest.mark.parametrize("num_layers", [7, 30, 61, 128])
def test_equal_layers_differ_by_one_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        sizes = partition(uniform(num_layers), num_stages)
        assert max(sizes) - min(sizes) <= 1


def test_a_head_of_eight_layers_moves_layers_to_the_front() -> None:
    assert partition(uniform(30), 4) == (7, 8, 7, 8)
    assert partition(uniform(30, last=8.0), 2) == (19, 11)
    assert partition(uniform(30, last=8.0), 4) == (9, 10, 9, 2)
    assert partition(uniform(4, last=50.0), 4) == (1, 1, 1, 1)


def test_layers_of_two_kinds() -> None:
    """As of a mixture of experts whose first layers are dense."""
    costs = StageCosts(layers=(1.0,) * 3 + (4.0,) * 6)
    assert partition(costs, 3) == (5, 2, 2)


def test_no_cut_has_a_faster_slowest_stage() -> None:
    draw = random.Random(7)
    fitting = 0
    for _ in range(400):
        num_layers = draw.randrange(1, 9)
        num_stages = draw.randrange(1, num_layers + 1)
        costs = StageCosts(
            layers=tuple(draw.choice([draw.random(), 1.0, 0.1, 0.0]) for _ in range(num_layers)),
            first=draw.random(),
            last=3 * draw.random(),
        )
        memory = None
        if draw.random() < 0.6:
            memory = StageMemory(
                layers=tuple(draw.randrange(1, 9) for _ in range(num_layers)),
                first=draw.randrange(5),
                last=draw.randrange(9),
                available=tuple(draw.randrange(1, 40) for _ in range(num_stages)),
            )
        best = _best_of_all(costs, num_stages, memory)
        if best is None:
            with pytest.raises(ConfigError, match="bytes of memory, too little for the layers from"):
                partition(costs, num_stages, memory)
            continue
        fitting += 1
        sizes = partition(costs, num_stages, memory)
        assert max(stage_sums(sizes, costs.layers, costs.first, costs.last)) == pytest.approx(best)
        assert memory is None or _fits(sizes, memory)
    assert fitting > 200


def _best_of_all(costs: StageCosts, num_stages: int, memory: StageMemory | None) -> float | None:
    num_layers = len(costs.layers)
    found = []
    for cut in combinations(range(1, num_layers), num_stages - 1):
        sizes = tuple(end - start for start, end in pairwise((0, *cut, num_layers)))
        if memory is None or _fits(sizes, memory):
            found.append(max(stage_sums(sizes, costs.layers, costs.first, costs.last)))
    return min(found, default=None)


def _fits(sizes: tuple[int, ...], memory: StageMemory) -> bool:
    needed = stage_sums(sizes, memory.layers, memory.first, memory.last)
    return all(one <= available for one, available in zip(needed, memory.available, strict=True))


def test_a_small_device_gets_few_layers() -> None:
    memory = StageMemory(layers=(2,) * 12, first=1, last=1, available=(100, 5, 100))
    assert partition(uniform(12), 3, memory) == (5, 2, 5)


def test_the_stage_that_is_too_small_is_named() -> None:
    memory = StageMemory(layers=(2,) * 12, first=1, last=1, available=(9, 6, 8))
    with pytest.raises(ConfigError, match=r"stage 2 of 3 has 8 bytes of memory, too little for the layers from 7 on"):
        partition(uniform(12), 3, memory)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size is 31, but the model has 30 layers; from 1 to 30"):
        partition(uniform(30), 31)


def test_a_wrong_sum_names_one_that_would_do() -> None:
    check_sum("10,10,10", (10, 10, 10), 30)
    with pytest.raises(ConfigError, match=r"'10,10,9', which sums to 29, and the model has 30 layers; 10,10,10 would"):
        check_sum("10,10,9", (10, 10, 9), 30)
