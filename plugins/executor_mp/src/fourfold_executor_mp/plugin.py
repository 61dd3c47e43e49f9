"""What this distribution offers. A table of contents: the executor is imported when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import ExecutorContext, ExecutorEntry, Suitability
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.executor import Executor, Follower

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_executors() -> list[ExecutorEntry]:
    """Offer ``mp``."""
    return [
        ExecutorEntry(
            name="mp",
            build=_build,
            summary="a process per rank, on this host and on nodes that join it",
            capabilities=frozenset({"processes"}),
            suits=_suits,
            follow=_follow,
        )
    ]


def _build(context: ExecutorContext) -> Executor:
    from fourfold_executor_mp.executor import MpExecutor

    return MpExecutor(context)


def _follow(context: ExecutorContext) -> Follower:
    from fourfold_executor_mp.follower import Follower

    return Follower(context)


def _suits(config: EngineConfig) -> Suitability:
    ranks = config.parallel.layout.engine_world_size
    nodes = config.nodes.nnodes
    if nodes > 1:
        return Suitability(score=100, reason=f"{ranks} ranks on {nodes} nodes (--nnodes), each in a process of its own")
    if ranks > 1:
        return Suitability(score=100, reason=f"{ranks} ranks on this host, each in a process of its own")
    return Suitability(score=10, reason="one rank, in a process that it does not need")
