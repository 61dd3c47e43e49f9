"""How much one step takes, and how much may wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fourfold.errors import ConfigError

_LIMITS: Final[Mapping[str, int]] = {
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "max_num_waiting": 1 << 24,
    "max_in_flight": 64,
}
"""Far beyond what helps: each costs memory, and a slip of the keyboard must not look for it."""


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
    """Steps in the air at once; default: one a pipeline stage, and one more where the device works by itself."""

    enforce_eager: bool = False
    """Whether decode steps run one operation at a time, in place of recorded ones; slower, for comparison."""

    def __post_init__(self) -> None:
        for name, high in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= high:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; from 1 to {high}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than --max-num-seqs "
                f"({self.max_num_seqs}); a step must hold one token of every running request"
            )

    @property
    def num_slots(self) -> int:
        """Rows of the workers' request state: running requests, and as many that ended while a step was in the air."""
        return 2 * self.max_num_seqs
