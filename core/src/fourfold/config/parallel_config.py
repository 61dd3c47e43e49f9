"""How the work is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fourfold.errors import ConfigError
from fourfold.layout import ParallelLayout

AUTO_PARTITION: Final = "auto"
MAX_REPLICAS: Final = 1024
"""Far beyond what one coordinator has been tried with; a slip of the finger starts no storm of processes."""
_DBO_THRESHOLDS: Final = ("dbo_decode_tokens", "dbo_prefill_tokens")
MEASURED_PARTITION: Final = "auto:measure"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the four cuts."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer."""
    pipeline_parallel_size: int = 1
    """Stages that share the depth."""
    data_parallel_size: int = 1
    """Copies of the engine."""
    enable_expert_parallel: bool = False
    """Whether each rank holds whole experts of a mixture, in place of a part of every one."""
    enable_dbo: bool = False
    """Whether a step's tokens go through the layers as two microbatches, one of which computes while what ranks tell
    each other about the other one is on its way.
    """
    dbo_decode_tokens: int = 32
    """Tokens of a step of decodes from which it is cut in two."""
    dbo_prefill_tokens: int = 512
    """The same of a step with parts of prompts."""
    lockstep_meeting: str = ""
    """Where replicas that share experts meet, as file://PATH or tcp://HOST:PORT; serve has a place of its own."""
    pipeline_partition: str = "auto"
    """Layers of each stage, such as 7,8,8,7; auto: the slowest stage is as fast as it can be, by the sizes of the
    layers; auto:measure: by timing them at the start.
    """
    debug_collectives: bool = False
    """Whether ranks compare every collective before they run it, and name the first that differs; slow."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", *_DBO_THRESHOLDS):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; 1 or more")
        if self.data_parallel_size > MAX_REPLICAS:
            raise ConfigError(f"--data-parallel-size is {self.data_parallel_size}; {MAX_REPLICAS} at most")
        if self.pipeline_partition not in (AUTO_PARTITION, MEASURED_PARTITION):
            _parse_partition(self.pipeline_partition, self.pipeline_parallel_size)

    @property
    def layout(self) -> ParallelLayout:
        """The rank arithmetic of these sizes."""
        return ParallelLayout(dp=self.data_parallel_size, pp=self.pipeline_parallel_size, tp=self.tensor_parallel_size)

    @property
    def lockstep(self) -> bool:
        """Whether replicas share experts, so that they step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def layers_of_stages(self) -> tuple[int, ...] | None:
        """What ``pipeline_partition`` says; None: it is to be found."""
        if self.pipeline_partition in (AUTO_PARTITION, MEASURED_PARTITION):
            return None
        return _parse_partition(self.pipeline_partition, self.pipeline_parallel_size)


def _parse_partition(option: str, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage from a text such as ``7,8,8,7``; raises ConfigError for one that cannot be."""
    example = ",".join(["8"] * num_stages)
    items = [item.strip() for item in option.split(",")]
    if not all(item.isascii() and item.isdecimal() for item in items):
        raise ConfigError(
            f"--pipeline-partition is {option!r}; give the layers of each stage, as in {example}, or {AUTO_PARTITION} "
            f"or {MEASURED_PARTITION}"
        )
    if len(items) != num_stages:
        raise ConfigError(
            f"--pipeline-partition is {option!r}, for {len(items)} stages, and --pipeline-parallel-size is "
            f"{num_stages}; give {num_stages} numbers, as in {example}"
        )
    sizes = tuple(int(item) for item in items)
    if 0 in sizes:
        raise ConfigError(
            f"--pipeline-partition is {option!r}, and stage {sizes.index(0)} would hold no layer; 1 or more each"
        )
    return sizes
