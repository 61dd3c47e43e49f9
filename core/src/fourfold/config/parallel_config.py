"""How the work is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import ConfigError
from fourfold.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the four cuts."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer."""
    pipeline_parallel_size: int = 1
    """Stages that share the depth."""
    data_parallel_size: int = 1
    """Copies of the engine."""
    debug_collectives: bool = False
    """Whether ranks compare every collective before they run it, and name the first that differs; slow."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; 1 or more")

    @property
    def layout(self) -> ParallelLayout:
        """The rank arithmetic of these sizes."""
        return ParallelLayout(dp=self.data_parallel_size, pp=self.pipeline_parallel_size, tp=self.tensor_parallel_size)
