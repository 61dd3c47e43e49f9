"""Whether requests may bring LoRA adapters, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters beside the model; without them nothing is slower."""

    enable_lora: bool = False
    """Whether LoRA adapters can be loaded, which requests then name as their model."""
    max_loras: int = 16
    """Adapters that are loaded at a time at most."""
    max_lora_rank: int = 16
    """The largest r of an adapter."""

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ConfigError(f"--max-loras is {self.max_loras}; 1 or more")
        if self.max_lora_rank < 1:
            raise ConfigError(f"--max-lora-rank is {self.max_lora_rank}; 1 or more")
