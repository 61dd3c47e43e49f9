"""Which layouts a model allows, from its description alone; asked before any weight is touched. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.errors import ConfigError
from fourfold.layers.partition import cut_heads
from fourfold.models.stage_partition import check_num_stages, check_sum
from fourfold.selection import AUTO

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.models.description import ModelDescription


def check_layout(description: ModelDescription, config: EngineConfig) -> None:
    """Raise ConfigError naming what would do, where the model cannot be laid out as ``config``, resolved, says."""
    parallel, experts = config.parallel, config.backends.experts
    spread = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    if parallel.enable_dbo and parallel.tensor_parallel_size == 1 and not spread:
        raise ConfigError(
            "--enable-dbo overlaps what ranks tell each other, and none does here; it needs --tensor-parallel-size 2 "
            "or more, or replicas with --enable-expert-parallel"
        )
    if parallel.enable_expert_parallel and description.mixture is None:
        raise ConfigError(
            f"{description.architecture} has no experts to spread over ranks; leave out --enable-expert-parallel, and "
            "the moe=... of --parallel-layer that says the same"
        )
    if experts != AUTO and description.mixture is None:
        raise ConfigError(f"--experts is {experts!r}, and {description.architecture} has no experts; leave it out")
    cut_heads(description.num_heads, description.num_kv_heads, 0, parallel.tensor_parallel_size)
    check_num_stages(parallel.pipeline_parallel_size, description.num_layers)
    sizes = parallel.layers_of_stages
    if sizes is not None:
        check_sum(parallel.pipeline_partition, sizes, description.num_layers)
