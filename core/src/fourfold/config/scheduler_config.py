"""How much one step takes, and how much may wait."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Budgets of the scheduler."""

    max_num_seqs: int = 64
    """Requests running at once."""
    max_num_batched_tokens: int = 1024
    """Tokens computed in one step, prompts (in chunks) and decodes together."""
    max_num_waiting: int = 4096
    """Requests waiting at once; one more is refused with status 429."""
    max_in_flight: int | None = None
    """Steps in the air at once; default: what the executor asks for."""

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_num_waiting", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; {low} or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than --max-num-seqs "
                f"({self.max_num_seqs}); a step must hold one token of every running request"
            )
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError(f"--max-in-flight is {self.max_in_flight}; 1 or more")

    @property
    def num_slots(self) -> int:
        """Rows of the workers' request state: running requests, and as many that ended while a step was in the air."""
        return 2 * self.max_num_seqs
