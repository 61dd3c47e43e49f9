"""The settings of this plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig

PLUGIN: Final = "moe-ep"
"""The entry point's name, under which the settings are found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallelSettings:
    """How experts are spread."""

    redundant_experts: int = 0
    """Copies of experts that the ranks hold together, beside one of each; for balance, one a rank is enough."""
    rebalance_interval: int = 0
    """Steps after which experts may move to where they balance the ranks; 0: they stay."""
    rebalance_gain: float = 0.05
    """How much more balanced (1 is perfect) the ranks must get for experts to move."""

    def __post_init__(self) -> None:
        if not 0 <= self.redundant_experts <= _MOST_REDUNDANT:
            raise ConfigError(f"--moe-ep-redundant-experts is {self.redundant_experts}; from 0 to {_MOST_REDUNDANT}")
        if self.rebalance_interval < 0:
            raise ConfigError(f"--moe-ep-rebalance-interval is {self.rebalance_interval}; 0, or a number of steps")
        if not 0.0 <= self.rebalance_gain <= 1.0:
            raise ConfigError(f"--moe-ep-rebalance-gain is {self.rebalance_gain}; from 0 to 1")


_MOST_REDUNDANT: Final = 4096
"""Far beyond what helps: each costs the memory of an expert in every layer."""


def settings_of(config: EngineConfig) -> ExpertParallelSettings:
    """What ``config`` says, or the defaults."""
    found = config.plugins.get(PLUGIN)
    return found if isinstance(found, ExpertParallelSettings) else ExpertParallelSettings()
