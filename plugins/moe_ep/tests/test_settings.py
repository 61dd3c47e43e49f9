"""Settings that would have no effect are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.errors import ConfigError
from fourfold.plugins import load_plugins
from fourfold_moe_ep.settings import PLUGIN, ExpertParallelSettings


@pytest.mark.parametrize(
    ("settings", "spread", "message"),
    [
        (ExpertParallelSettings(redundant_experts=2), False, "--moe-ep-redundant-experts is 2, .* add --enable-expert"),
        (ExpertParallelSettings(rebalance_interval=9), False, "--moe-ep-rebalance-interval is 9, .* add --enable-expe"),
        (ExpertParallelSettings(rebalance_gain=0.5), True, "--moe-ep-rebalance-gain is 0.5, and experts stay"),
        (ExpertParallelSettings(rebalance_gain=0.5, rebalance_interval=9), True, None),
        (ExpertParallelSettings(), False, None),
    ],
)
def test_what_has_no_effect_is_refused(settings: ExpertParallelSettings, spread: bool, message: str | None) -> None:
    parallel = ParallelConfig(enable_expert_parallel=spread)
    config = EngineConfig(parallel=parallel, plugins={PLUGIN: settings})
    registry = load_plugins()
    if message is None:
        registry.check_config(config)
        return
    with pytest.raises(ConfigError, match=message):
        registry.check_config(config)


def test_a_rebalancer_is_asked_after_some_steps() -> None:
    backends = BackendConfig(rebalancer="greedy")
    config = EngineConfig(parallel=ParallelConfig(enable_expert_parallel=True), backends=backends)
    with pytest.raises(ConfigError, match="--rebalancer is greedy, and experts stay where they are; set --moe-ep-reb"):
        load_plugins().check_config(config)
    settings = ExpertParallelSettings(rebalance_interval=9)
    load_plugins().check_config(replace(config, plugins={PLUGIN: settings}))
