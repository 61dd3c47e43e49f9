"""What this distribution offers. A table of contents: the executor is imported when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import ExecutorContext, ExecutorEntry, Suitability
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.executor import Executor

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_executors() -> list[ExecutorEntry]:
    """Offer ``uniproc``."""
    return [ExecutorEntry(name="uniproc", build=_build, summary="one rank, in the engine's own process", suits=_suits)]


def _build(context: ExecutorContext) -> Executor:
    from fourfold_executor_uniproc.executor import UniprocExecutor

    return UniprocExecutor(context)


def _suits(config: EngineConfig) -> Suitability:
    parallel = config.parallel
    ranks = parallel.layout.engine_world_size
    if ranks == 1:
        return Suitability(score=100, reason="one rank needs no process of its own")
    return Suitability(
        score=0,
        reason=(
            f"runs one rank, and --tensor-parallel-size {parallel.tensor_parallel_size} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} makes {ranks}; install an executor plugin for several ranks"
        ),
    )
