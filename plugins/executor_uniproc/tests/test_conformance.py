from __future__ import annotations

from fourfold.testing.executor import ExecutorConformance


class TestUniproc(ExecutorConformance):
    name = "uniproc"
    world_size = 1
