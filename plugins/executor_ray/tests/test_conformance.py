from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from fourfold.contracts.executor import Executor
from fourfold.entries import ExecutorEntry
from fourfold.errors import EngineError
from fourfold.testing.executor import ExecutorConformance

from .conftest import RayCluster


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Executor]]:
    """The executor that tests share, if there is one."""
    executors: list[Executor] = []
    yield executors
    for executor in executors:
        executor.shutdown()


@pytest.mark.usefixtures("cluster")
class TestRay(ExecutorConformance):
    name = "ray"
    world_size = 2

    @pytest.fixture
    def executor(self, entry: ExecutorEntry, kept: list[Executor], cluster: RayCluster) -> Executor:
        """As a start takes seconds, one serves all tests that leave it in order."""
        for executor in kept:
            with suppress(EngineError):
                executor.collective_rpc("who", timeout=5)
                return executor
            executor.shutdown()
        kept[:] = [entry.build(self.context())]
        return kept[0]


@pytest.mark.long
class TestRayOverTwoNodes(TestRay):
    """More ranks than a node has room for."""

    world_size = 4
