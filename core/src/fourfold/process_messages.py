"""What travels between the supervisor of a deployment, its processes and their listeners; typed msgpack, no torch."""

from __future__ import annotations

import msgspec

from fourfold.messages import EngineFailed, EngineReady

# --- supervisor -> API servers -----------------------------------------------------------------------------------


class EngineStarting(msgspec.Struct, frozen=True, kw_only=True, tag="starting"):
    """A new process will speak for the engine; older incarnations are not to be heard."""

    engine: int
    incarnation: int


class EngineDraining(msgspec.Struct, frozen=True, kw_only=True, tag="draining"):
    """The engine finishes what it has and ends; it takes no more requests."""

    engine: int
    incarnation: int


class EngineDead(msgspec.Struct, frozen=True, kw_only=True, tag="dead"):
    """An engine is no more, or failed to start; what it had of requests has to go on elsewhere."""

    engine: int
    incarnation: int
    reason: str
    planned: bool = False
    """Whether it was ended on purpose."""
    with_node: bool = False
    """Whether its node is lost, and all engines there."""

    @property
    def blameless(self) -> bool:
        """Whether no request can have been the cause."""
        return self.planned or self.with_node


EngineNotice = EngineStarting | EngineReady | EngineDraining | EngineDead


# --- supervisor -> engines ---------------------------------------------------------------------------------------


class DrainEngine(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Finish what is there, then end."""


class ForgetClient(msgspec.Struct, frozen=True, kw_only=True, tag="forget_client"):
    """An API server has died: end what it asked for. Another process takes its place, and may have asked too by now."""

    client: int
    died: float
    """Unix seconds, by the clock of the API servers."""


EngineOrder = DrainEngine | ForgetClient


# --- children -> supervisor, beside EngineReady and EngineFailed -------------------------------------------------


class ProcessReady(msgspec.Struct, frozen=True, kw_only=True, tag="process_ready"):
    """A process that is no engine does its work."""


class ProcessFailed(msgspec.Struct, frozen=True, kw_only=True, tag="process_failed"):
    """The last word of a process that is no engine; fields as those of EngineFailed."""

    message: str
    traceback: str = ""
    refused: bool = False


class RestartEngine(msgspec.Struct, frozen=True, kw_only=True, tag="restart_engine"):
    """An API server wants a replica restarted, once its requests have ended or ``now``, whatever it does."""

    engine: int
    now: bool = False


ProcessReport = EngineReady | EngineFailed | ProcessReady | ProcessFailed | RestartEngine
