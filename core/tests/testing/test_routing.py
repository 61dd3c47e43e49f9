from __future__ import annotations

import numpy as np
import pytest
import torch

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
