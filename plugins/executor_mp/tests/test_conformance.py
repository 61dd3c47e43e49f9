from __future__ import annotations

from fourfold.testing.executor import ExecutorConformance


class TestMp(ExecutorConformance):
    name = "mp"
    world_size = 2
