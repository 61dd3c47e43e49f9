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

    def __post_init__(self) -> None:
        if not 0 <= self.redundant_experts <= _MOST_REDUNDANT:
            raise ConfigError(f"--moe-ep-redundant-experts is {self.redundant_experts}; from 0 to {_MOST_REDUNDANT}")


_MOST_REDUNDANT: Final = 4096
"""Far beyond what helps: each costs the memory of an expert in every layer."""


def settings_of(config: EngineConfig) -> ExpertParallelSettings:
    """What ``config`` says, or the defaults."""
    found = config.plugins.get(PLUGIN)
    return found if isinstance(found, ExpertParallelSettings) else ExpertParallelSettings()
