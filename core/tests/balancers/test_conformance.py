from __future__ import annotations

import random

import pytest

from fourfold import hookimpl
from fourfold.contracts.load_balancer import BalancedRequest, EngineLoads
from fourfold.entries import LoadBalancerContext, LoadBalancerEntry
from fourfold.plugins import load_plugins
from fourfold.testing.load_balancer import LoadBalancerConformance


class TestLeastWork(LoadBalancerConformance):
    name = "least-work"


class TestPrefixAffinity(LoadBalancerConformance):
    name = "prefix-affinity"


class TestRoundRobin(LoadBalancerConformance):
    name = "round-robin"


class TestRandomTwo(LoadBalancerConformance):
    name = "random-two"


class FewestRequests:
    """What an outsider may write: no imports of core but for the types."""

    def __init__(self, context: LoadBalancerContext) -> None:
        self._random = random.Random(context.seed)

    def choose(self, request: BalancedRequest, loads: EngineLoads) -> int:
        engines = [int(engine) for engine in loads.ready_engines()]
        counts = (loads.num_running + loads.num_waiting).tolist()
        return min(engines, key=lambda engine: (counts[engine], self._random.random()))

    def learn_prefixes(self, engine: int, marks: object) -> None: ...


class OutsidersPlugin:
    @hookimpl
    def fourfold_load_balancers(self) -> list[LoadBalancerEntry]:
        capabilities = frozenset({"load_aware"})
        return [LoadBalancerEntry(name="fewest-requests", build=FewestRequests, capabilities=capabilities)]


class TestOutsiders(LoadBalancerConformance):
    name = "fewest-requests"

    @pytest.fixture
    def entry(self) -> LoadBalancerEntry:
        registry = load_plugins(extra={"outsider": OutsidersPlugin()})
        return registry.load_balancers()[self.name]
