from __future__ import annotations

import numpy as np
import pytest
import torch

from fourfold.errors import ConfigError
from fourfold.testing.routing import LOADS, RoutingSimulator, expert_load


def counted(simulator: RoutingSimulator, layer: int, num_experts: int, num_tokens: int) -> np.ndarray:
    """The share of each expert in what is asked for."""
    ids, _ = simulator.route(layer, num_tokens)
    return torch.bincount(ids.flatten(), minlength=num_experts).double().numpy() / ids.numel()


@pytest.mark.parametrize("kind", LOADS)
def test_one_expert_a_token_follows_the_load(kind: str) -> None:
    load = expert_load(kind, 2, 16, seed=3)
    assert load.sum(axis=1) == pytest.approx([1.0, 1.0])
    simulator = RoutingSimulator(load, top_k=1, seed=1)
    for layer in range(2):
        assert counted(simulator, layer, 16, 20_000) == pytest.approx(load[layer], abs=0.015)


def test_hot_experts_are_hot_and_elsewhere_in_each_layer() -> None:
    for kind, least in (("zipf", 4.0), ("lognormal", 4.0), ("hot", 16.0)):
        load = expert_load(kind, 8, 64)
        assert (load.max(axis=1) >= least / 64).all()
        assert len(set(load.argmax(axis=1).tolist())) > 4
    assert (expert_load("even", 2, 8) == 1 / 8).all()


def test_a_token_takes_different_experts_with_weights_that_add_up_to_one() -> None:
    simulator = RoutingSimulator(expert_load("zipf", 1, 8), top_k=4)
    ids, weights = simulator.route(0, 500)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(500))


def test_equal_seeds_route_alike_and_an_expert_without_load_is_not_asked() -> None:
    load = np.array([[0.0, 1.0, 2.0, 3.0]])
    first, second, other = (RoutingSimulator(load, top_k=2, seed=seed).route(0, 50)[0] for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert (first > 0).all()


@pytest.mark.parametrize(
    ("load", "top_k", "message"),
    [
        ([[1.0, 0.0, 2.0], [1.0, 1.0, 1.0]], 3, "asks for 3 experts that differ; from 1 to 2, which have any load"),
        ([[0.0, 0.0]], 1, "from 1 to 0"),
        ([[1.0, 1.0]], 0, "asks for 0 experts that differ; from 1 to 2"),
        ([[1.0, -1.0]], 1, "a number of 0 or more for each expert"),
        ([[1.0, np.nan]], 1, "a number of 0 or more for each expert"),
    ],
)
def test_a_load_that_no_router_could_have_is_refused(load: list[list[float]], top_k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingSimulator(np.array(load), top_k=top_k)


def test_an_unknown_load_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no load is called 'zip'; there are even, hot, lognormal, zipf"):
        expert_load("zip", 1, 4)
    assert expert_load("hot", 1, 1).tolist() == [[1.0]]
