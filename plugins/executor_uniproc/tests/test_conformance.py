from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.config.backend_config import BackendConfig
from fourfold.config.model_config import ModelConfig
from fourfold.entries import ExecutorContext
from fourfold.testing.executor import ECHO, ExecutorConformance


class TestUniproc(ExecutorConformance):
    name = "uniproc"
    world_size = 1


@pytest.mark.usefixtures("launched")
class TestExternal(ExecutorConformance):
    """The promises within one rank; what several ranks do is in ``test_external.py``."""

    name = "external"
    world_size = 1

    def context(self, worker: str = ECHO) -> ExecutorContext:
        context = super().context(worker)
        config = replace(context.config, model=ModelConfig(seed=0), backends=BackendConfig(executor=self.name))
        return replace(context, config=config)
