"""Which layers this rank holds: the same answer on every rank, before any weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fourfold.config.parallel_config import MEASURED_PARTITION
from fourfold.models.layer_costs import stage_costs, stage_memory
from fourfold.models.parallel_limits import check_layout
from fourfold.models.stage_partition import Stage, StageCosts, partition, stages

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.distributed.model_parallel import ModelParallel
    from fourfold.models.description import ModelDescription
    from fourfold.worker.device import Device

log = logging.getLogger(__name__)


def choose_stage(
    config: EngineConfig,
    description: ModelDescription,
    parallel: ModelParallel,
    device: Device,
    measure: Callable[[], StageCosts],
) -> Stage:
    """The stage of this rank; all ranks must call this. ``measure`` times the layers, where that is asked for.

    Raises ConfigError for a model that cannot be cut so, or does not fit the stages' memory.
    """
    check_layout(description, config)
    sizes = config.parallel.layers_of_stages
    if parallel.pp.world_size == 1:
        sizes = (description.num_layers,)
    elif sizes is None:
        sizes = _agree(config, description, parallel, device, measure)
    if parallel.rank == 0 and len(sizes) > 1:
        log.info("layers of the stages: %s", ",".join(map(str, sizes)))
    return stages(sizes)[parallel.pp.rank]


def _agree(
    config: EngineConfig,
    description: ModelDescription,
    parallel: ModelParallel,
    device: Device,
    measure: Callable[[], StageCosts],
) -> tuple[int, ...]:
    """What the first ranks of all stages find; the others of a stage take it from theirs, and engines that share
    experts from the first one: they have to hold the same layers.
    """
    pp = parallel.pp
    if config.parallel.pipeline_partition == MEASURED_PARTITION:
        costs = _of_first_stage(measure(), pp)
    else:
        costs = stage_costs(description)
    available = [pp.broadcast_object(device.memory_bytes, source=stage) for stage in range(pp.world_size)]
    memory = stage_memory(
        description,
        available=available,
        max_model_len=config.model.max_model_len or description.max_model_len,
        item_bytes=device.dtype.itemsize,
        tp=parallel.tp.world_size,
    )
    sizes: tuple[int, ...] = parallel.ep.broadcast_object(partition(costs, pp.world_size, memory))
    return sizes


def _of_first_stage(costs: StageCosts, pp: GroupCoordinator) -> StageCosts:
    """Times differ a little from rank to rank, and all must cut alike."""
    layers, first, last = pp.broadcast_object((costs.layers, costs.first, costs.last))
    return StageCosts(layers=layers, first=first, last=last)
