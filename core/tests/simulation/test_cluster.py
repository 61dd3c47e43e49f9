"""What policies are for, in figures. Virtual time: the same on every machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fourfold.plugins import load_plugins
from fourfold.simulation.cluster import Outcome, SimulatedCluster
from fourfold.simulation.engine_model import EngineModel
from fourfold.simulation.figures import Figures
from fourfold.simulation.workload import Workload, conversations, skewed

POLICIES = load_plugins().load_balancers()
MODEL = EngineModel()


def play(load: Workload, policy: str, *, num_engines: int = 8, num_servers: int = 4) -> Outcome:
    build = POLICIES[policy].build
    return SimulatedCluster(load, build, num_engines=num_engines, num_servers=num_servers, model=MODEL).run()


@pytest.mark.parametrize("num_servers", [1, 4])
@pytest.mark.parametrize("policy", ["least-work", "prefix-affinity", "random-two"])
def test_looking_at_work_shortens_the_longest_waits(policy: str, num_servers: int) -> None:
    load = skewed(8000, 8 * 16, seed=0)
    even = Figures.of(play(load, "round-robin", num_servers=num_servers))
    looked = Figures.of(play(load, policy, num_servers=num_servers))
    assert looked.ttft_p99 < 0.75 * even.ttft_p99
    assert looked.queueing_p99 < 0.7 * even.queueing_p99
    assert looked.imbalance < even.imbalance


@pytest.mark.parametrize("num_servers", [1, 4])
def test_conversations_stay_and_their_prompts_are_not_computed_again(num_servers: int) -> None:
    load = conversations(6000, 8 * 8, seed=0)
    even = Figures.of(play(load, "round-robin", num_servers=num_servers))
    stuck = Figures.of(play(load, "prefix-affinity", num_servers=num_servers))
    assert stuck.kept is not None
    assert stuck.kept >= 0.9
    assert stuck.prompt_tokens_computed < 0.5 * even.prompt_tokens_computed
    assert stuck.ttft_p99 < even.ttft_p99
    assert stuck.imbalance < 1.1 * even.imbalance


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_served_once_and_in_order(policy: str) -> None:
    load = conversations(2000, 60, seed=3)
    outcome = play(load, policy, num_engines=5, num_servers=3)
    assert (load.arrival <= outcome.admitted).all()
    assert (outcome.admitted < outcome.first).all()
    assert (outcome.first <= outcome.finished).all()
    assert (outcome.hit_tokens < load.prompt_tokens).all()
    assert set(outcome.engine.tolist()) == set(range(5))


def test_it_is_the_same_each_time() -> None:
    load = conversations(1000, 40, seed=1)
    one, other = play(load, "prefix-affinity"), play(load, "prefix-affinity")
    assert dataclasses.astuple(Figures.of(one)) == dataclasses.astuple(Figures.of(other))
    assert np.array_equal(one.first, other.first)


def test_progress_is_told() -> None:
    heard: list[float] = []
    cluster = SimulatedCluster(
        skewed(200, 10, seed=0), POLICIES["round-robin"].build, num_engines=1, num_servers=1, model=MODEL
    )
    cluster.run(heard.append)
    assert heard == sorted(heard)
    assert 0 < heard[-1] <= 1
