"""Every deadline, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutConfig:
    """Deadlines; everything that waits has one."""

    startup_timeout: float = 600.0
    """From the start of a process to ready."""
    rpc_timeout: float = 300.0
    """One call to the workers."""
    stall_timeout: float = 60.0
    """/health answers 503 when a request is running and no step has finished for this long."""
    self_test_timeout: float = 10.0
    """What connects the ranks must move the right data within this time, or the next one is taken."""
    drain_timeout: float = 30.0
    """From SIGTERM until running requests are ended."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not 0 < getattr(self, name) < 1e9 and not (name == "drain_timeout" and self.drain_timeout == 0):
                bound = "0 or more" if name == "drain_timeout" else "above 0"
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name):g}; seconds {bound}, and below 1e9"
                )
