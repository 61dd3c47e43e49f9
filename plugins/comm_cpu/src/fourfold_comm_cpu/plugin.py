"""What this distribution offers. A table of contents: torch and the library are loaded when something is built."""

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
    """Offer ``shm``, ``gloo``, and both together."""
    return [
        CommunicatorEntry(
            name="shm",
            build=_build_shm,
            summary="shared memory, for ranks of one host",
            capabilities=frozenset({"cpu", "deterministic", "one_host", "peer_memory"}),
            suits=lambda config: Suitability(score=50, reason="ranks of one host share its memory"),
        ),
        CommunicatorEntry(
            name="shm-gloo",
            build=_build_layered,
            summary="sums in shared memory inside hosts, then over TCP between them",
            capabilities=frozenset({"cpu", "deterministic", "several_hosts"}),
            suits=lambda config: Suitability(score=20, reason="a sum crosses the network once a host, not once a rank"),
        ),
        CommunicatorEntry(
            name="gloo",
            build=_build_gloo,
            summary="torch.distributed gloo over TCP",
            capabilities=frozenset({"cpu", "deterministic"}),
            suits=_suits_gloo,
        ),
    ]


def _build_shm(context: CommunicatorContext) -> Communicator:
    from fourfold_comm_cpu.shm import build

    return build(context)


def _build_gloo(context: CommunicatorContext) -> Communicator:
    from fourfold_comm_cpu.gloo import build

    return build(context)


def _build_layered(context: CommunicatorContext) -> Communicator:
    from fourfold_comm_cpu.layered import build

    return build(context)


def _suits_gloo(config: EngineConfig) -> Suitability:
    return Suitability(score=10, reason="TCP connects CPU ranks anywhere")
