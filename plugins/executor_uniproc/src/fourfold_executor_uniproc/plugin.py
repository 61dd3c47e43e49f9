"""What this distribution offers. A table of contents: an executor is imported when it is built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fourfold.entries import ExecutorContext, ExecutorEntry, Suitability
from fourfold.errors import ConfigError
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.executor import Executor

FOURFOLD_CONTRACT = ">=1.0,<2"
_EXTERNAL = "external"


@hookimpl
def fourfold_executors() -> list[ExecutorEntry]:
    """Offer ``uniproc`` and ``external``."""
    return [
        ExecutorEntry(name="uniproc", build=_build, summary="one rank, in the engine's own process", suits=_suits),
        ExecutorEntry(
            name=_EXTERNAL,
            build=_build_external,
            summary="this process is one of the ranks that torchrun or another launcher started",
            suits=_suits_external,
            offline_only="every rank runs the same program with the same prompts, and a server has only one",
        ),
    ]


def _build(context: ExecutorContext) -> Executor:
    from fourfold_executor_uniproc.executor import UniprocExecutor

    return UniprocExecutor(context)


def _build_external(context: ExecutorContext) -> Executor:
    from fourfold_executor_uniproc.external import ExternalExecutor

    return ExternalExecutor(context)


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


def _suits_external(config: EngineConfig) -> Suitability:
    from fourfold_executor_uniproc.launcher import read_launcher

    if config.backends.executor != _EXTERNAL:
        return Suitability(score=0, reason=f"joins the ranks of a launcher only where --executor is {_EXTERNAL!r}")
    if config.model.seed is None:
        return Suitability(score=0, reason="every rank draws its own tokens; give all of them the same --seed")
    try:
        launched = read_launcher(os.environ)
    except ConfigError as error:
        return Suitability(score=0, reason=str(error))
    ranks = config.parallel.layout.world_size
    if launched.world_size != ranks:
        return Suitability(score=0, reason=f"WORLD_SIZE is {launched.world_size}, and the config makes {ranks} rank(s)")
    return Suitability(score=100, reason=f"rank {launched.rank} of {launched.world_size} that a launcher started")
