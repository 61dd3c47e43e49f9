"""The whole config of one engine; the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.config.backend_config import BackendConfig
from fourfold.config.cache_config import CacheConfig
from fourfold.config.lora_config import LoraConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.node_config import NodeConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What an engine and its workers are built from; travels between processes as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    backends: BackendConfig = field(default_factory=BackendConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    nodes: NodeConfig = field(default_factory=NodeConfig)
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """Settings of plugins: plugin name -> its own frozen dataclass."""

    def __post_init__(self) -> None:
        if self.lora.enable_lora and self.parallel.enable_dbo:
            raise ConfigError("--enable-lora says for a whole step whose tokens are whose; leave --enable-dbo out")
