from __future__ import annotations

import pytest

from fourfold.testing.executor import ExecutorConformance

from .conftest import RayCluster


class TestRay(ExecutorConformance):
    name = "ray"
    world_size = 2

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
