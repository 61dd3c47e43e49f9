"""What this plugin offers: an executor and a communicator that fail as told, odd transports, a point in the engine, and
experts that never rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fourfold.entries import (
    CommunicatorContext,
    CommunicatorEntry,
    ExecutorContext,
    ExecutorEntry,
    ParallelLayerContext,
    ParallelLayerEntry,
    Suitability,
)
from fourfold.markers import hookimpl
from fourfold_faults.points import Points, read_faults

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.messages import EngineStats

FOURFOLD_CONTRACT = ">=1.0,<2"
TRANSPORTS = ("delayed", "slow", "unbuffered")
_engine = Points("engine")


@hookimpl
def fourfold_executors() -> list[ExecutorEntry]:
    return [
        ExecutorEntry(
            name="faults",
            build=_build_executor,
            summary="mp, whose workers fail as they are told",
            suits=lambda config: Suitability(score=1, reason="fails on purpose"),
        )
    ]


@hookimpl
def fourfold_communicators() -> list[CommunicatorEntry]:
    return [
        CommunicatorEntry(
            name="faulty",
            build=_build_communicator,
            summary="shm, which fails as it is told",
            suits=_suits,
        ),
        *(
            CommunicatorEntry(
                name=name,
                build=partial(_build_transport, name),
                summary=f"shm, whose pipes are {name}",
                suits=lambda config: Suitability(score=1, reason="odd on purpose"),
            )
            for name in TRANSPORTS
        ),
    ]


@hookimpl
def fourfold_parallel_layers() -> list[ParallelLayerEntry]:
    return [
        ParallelLayerEntry(
            name="restless",
            kind="moe",
            build=_build_restless,
            summary="ep, whose experts move all the time",
            capabilities=frozenset({"expert_parallel", "microbatches"}),
            suits=lambda config: Suitability(score=1, reason="restless on purpose"),
        )
    ]


@hookimpl
def fourfold_step_finished(stats: EngineStats) -> None:
    _engine.reach("step")


def _build_executor(context: ExecutorContext) -> Any:
    from fourfold.plugins import load_plugins

    worker = "fourfold_faults.worker:FaultyWorker"
    return load_plugins().executors()["mp"].build(replace(context, worker=worker))


def _build_communicator(context: CommunicatorContext) -> Any:
    from fourfold_faults.communicator import FaultyCommunicator

    return FaultyCommunicator(context)


def _build_transport(name: str, context: CommunicatorContext) -> Any:
    from fourfold_faults.transports import KINDS

    return KINDS[name](context)


def _build_restless(context: ParallelLayerContext) -> Any:
    from fourfold_faults.restless import RestlessLayer

    return RestlessLayer(context)


def _suits(config: EngineConfig) -> Suitability:
    if any(fault.point.startswith("comm.") for fault in read_faults()):
        return Suitability(score=1000, reason="it is to fail")
    return Suitability(score=0, reason="no fault is asked of it")
