"""Assembles one engine: executor, loaded workers, a cache that fits, and the core that drives them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.blame import blame
from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import describe_checkpoint
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import plan_nodes
from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.scheduling_policy import SchedulingPolicy
from fourfold.engine.cache_plan import plan_cache
from fourfold.engine.engine_core import EngineCore
from fourfold.engine.executor_client import ExecutorClient
from fourfold.engine.refusal import refusal
from fourfold.entries import ExecutorContext, SchedulerContext, SchedulerEntry
from fourfold.errors import EngineError, ExecutorFailed, WorkerError
from fourfold.messages import EngineReady, StageInfo, WorkerInfo
from fourfold.models.parallel_limits import check_layout
from fourfold.plugins import PluginRegistry
from fourfold.selection import select

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine that has done a real forward pass."""

    core: EngineCore
    client: ExecutorClient
    """Of the ranks that ``core`` drives, for what is no step."""
    ready: EngineReady


def build_engine(
    config: EngineConfig, registry: PluginRegistry, *, dp_rank: int = 0, started: float | None = None
) -> BuiltEngine:
    """Start the ranks, load the model, size the cache, warm up; ``started`` is as in ExecutorContext, by default now.

    Raises what went wrong, after ending the ranks: ConfigError and PluginError for what the user can change,
    EngineError for a rank that failed.
    """
    started = time.monotonic() if started is None else started
    description = describe_checkpoint(config.model, registry, NoProgress())
    check_layout(description, config)
    scheduler = select("scheduler", registry.schedulers(), config.backends.scheduler, config)
    executor = select("executor", registry.executors(), config.backends.executor, config)
    logger.debug("%s; %s", executor.reason, scheduler.reason)  # the names were chosen, and logged, before
    nodes = plan_nodes(config)
    context = ExecutorContext(
        config=config,
        layout=config.parallel.layout,
        dp_rank=dp_rank,
        first_local_rank=nodes.first_local_rank(dp_rank),
        local_workers=nodes.local_workers,
        started=started,
    )
    client = ExecutorClient(executor.entry.build(context), config, started=started)
    try:
        client.on_failure(lambda error: _tell_lost(registry, error))
        workers = client.load()
        max_model_len = config.model.max_model_len or description.max_model_len
        plan = plan_cache(workers, config.cache, max_model_len=max_model_len)
        client.initialize_cache(plan.cache)
        client.warm_up()
        core = EngineCore(
            config,
            client,
            kv_cache=plan.cache,
            max_model_len=max_model_len,
            vocabulary_size=description.vocab_size,
            policy=_build_policy(scheduler.entry, config),
            events=registry.events,
        )
    except WorkerError as error:
        _shut_down(client)
        raise refusal(error, num_ranks=context.layout.engine_world_size) or error from error
    except BaseException:
        _shut_down(client)
        raise
    ready = EngineReady(
        engine=dp_rank,
        incarnation=0,
        num_blocks=plan.cache.num_blocks,
        kv_cache_tokens=plan.tokens,
        kv_cache_bytes=plan.bytes_per_rank,
        max_model_len=max_model_len,
        device=workers[0].device,
        dtype=workers[0].dtype,
        backends={"executor": executor.entry.name, "scheduler": scheduler.entry.name, **workers[0].backends},
        workers=client.processes(),
        stages=_stages(workers, config.parallel),
    )
    return BuiltEngine(core=core, client=client, ready=ready)


def _build_policy(entry: SchedulerEntry, config: EngineConfig) -> SchedulingPolicy:
    with blame(f"scheduler {entry.name!r}"):
        return entry.build(SchedulerContext(config=config))


def _stages(workers: Sequence[WorkerInfo], parallel: ParallelConfig) -> list[StageInfo]:
    tp = parallel.tensor_parallel_size
    if parallel.pipeline_parallel_size == 1:
        return []
    return [
        StageInfo(
            first_layer=min(first.kv_cache_specs),
            last_layer=max(first.kv_cache_specs),
            ranks=list(range(first.rank, first.rank + tp)),
        )
        for first in workers[::tp]
    ]


def _tell_lost(registry: PluginRegistry, error: EngineError) -> None:
    if isinstance(error, WorkerError | ExecutorFailed) and error.rank is not None:
        registry.events.worker_lost(error.rank, str(error))


def _shut_down(client: ExecutorClient) -> None:
    """End the ranks of an engine that could not be built, without hiding why."""
    try:
        client.shutdown()
    except Exception:
        logger.exception("the ranks of an engine that could not be built did not end cleanly")
