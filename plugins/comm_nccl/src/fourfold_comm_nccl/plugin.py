"""What this distribution offers. A table of contents: torch is loaded when something is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import CommunicatorEntry, Suitability
from fourfold.markers import hookimpl

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.communicator import Communicator
    from fourfold.entries import CommunicatorContext

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
            suits=_suits,
        )
    ]


def _build(context: CommunicatorContext) -> Communicator:
    from fourfold_comm_nccl.nccl import build

    return build(context)


def _suits(config: EngineConfig) -> Suitability:
    from fourfold.config.resolution import accelerator

    if accelerator() != "cuda":
        return Suitability(
            score=0, reason="moves tensors between CUDA devices, and this host has none; use --comm auto"
        )
    return Suitability(score=100, reason="this host has CUDA devices")
