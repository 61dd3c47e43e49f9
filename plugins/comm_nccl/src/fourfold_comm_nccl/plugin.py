"""What this distribution offers. A table of contents: torch is loaded when something is built."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fourfold.entries import AllToAllEntry, CommunicatorEntry, Suitability
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.mixture import AllToAll
    from fourfold.entries import AllToAllContext, CommunicatorContext

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_communicators() -> list[CommunicatorEntry]:
    """Offer ``nccl``."""
    return [
        CommunicatorEntry(
            name="nccl",
            build=_build,
            summary="NCCL, for ranks on CUDA devices; sums of our own over NVLink where they are faster",
            capabilities=frozenset({"cuda", "graph_safe", "peer_memory"}),
            suits=partial(_suits, option="--comm"),
        )
    ]


@hookimpl
def fourfold_all_to_alls() -> list[AllToAllEntry]:
    """Offer ``peer``."""
    return [
        AllToAllEntry(
            name="peer",
            build=_build_all_to_all,
            summary="a token written straight into the memory of the devices that have its experts",
            capabilities=frozenset({"cuda", "graph_safe", "peer_memory"}),
            suits=partial(_suits, option="--all-to-all"),
        )
    ]


def _build(context: CommunicatorContext) -> Communicator:
    from fourfold_comm_nccl.nccl import build

    return build(context)


def _build_all_to_all(context: AllToAllContext) -> AllToAll:
    from fourfold_comm_nccl.peer_all_to_all import PeerAllToAll

    return PeerAllToAll(context)


def _suits(config: EngineConfig, option: str) -> Suitability:
    from fourfold.config.resolution import accelerator

    if accelerator() != "cuda":
        return Suitability(
            score=0, reason=f"moves tensors between CUDA devices, and this host has none; use {option} auto"
        )
    return Suitability(score=100, reason="this host has CUDA devices")
