"""What operators and their tools ask: probes, metrics, version, topology."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from fourfold.client.engine_link import EngineLink
from fourfold.contracts.load_balancer import EngineState
from fourfold.errors import FourfoldError
from fourfold_server.errors import RETRY_AFTER_SECONDS
from fourfold_server.state import ServerState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REPORT_SECONDS: Final = 2.0
"""For an engine to say what its layers do, after the steps in the air."""

logger = logging.getLogger(__name__)


def operations_router(state: ServerState) -> APIRouter:
    """The probes take GET and HEAD and need no API key."""
    router = APIRouter()

    @router.head("/livez", include_in_schema=False)
    @router.get("/livez", summary="Whether the process answers")
    async def live() -> Response:
        return JSONResponse({"status": "alive"})

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", summary="Whether requests are taken now")
    async def ready() -> Response:
        await state.catch_up()
        return _probe(state.unready_reason(), "ready", _failing(state))

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the engines make progress")
    async def health() -> Response:
        return _probe(_unhealthy_reason(state), "healthy", _progress(state))

    @router.get("/metrics", summary="Counts and times for Prometheus")
    async def metrics() -> Response:
        return Response(state.metrics.render(), headers={"content-type": METRICS_TYPE})

    @router.get("/version", summary="The version of the server")
    async def show_version() -> Response:
        return JSONResponse({"version": version("fourfold-server")})

    @router.get("/topology", summary="The processes of this deployment, its stages and its experts")
    async def topology() -> Response:
        return JSONResponse({**state.topology(), "stages": _stages(state), "layers": await _layers(state)})

    return router


def _stages(state: ServerState) -> list[dict[str, Any]]:
    """Of the engines that are pipelines; ``busy_share`` is None until they have been asked twice."""
    rows = []
    for link in state.client.links:
        for index, stage in enumerate(link.ready.stages if link.ready is not None else ()):
            shares = link.stats.stage_bubble_shares
            busy = round(1 - shares[index], 3) if index < len(shares) else None
            place = {"engine": link.rank, "stage": index, "ranks": stage.ranks}
            rows.append({**place, "layers": [stage.first_layer, stage.last_layer], "busy_share": busy})
    return rows


async def _layers(state: ServerState) -> list[dict[str, Any]]:
    """What the layers of engines show that keep figures, a row a stage; nothing of an engine that does not answer."""
    ready = [link for link in state.client.links if link.state is EngineState.READY and link.stats.layer_counters]
    reports = await asyncio.gather(*(_report(state, link) for link in ready))
    return [
        {"engine": link.rank, "stage": stage, **shown}
        for link, stages in zip(ready, reports)
        for stage, shown in enumerate(stages)
        if shown
    ]


async def _report(state: ServerState, link: EngineLink) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            found: list[dict[str, Any]] = await state.client.call_utility(link.engine, "layer_report")
    except (TimeoutError, FourfoldError) as error:
        logger.warning("engine %d does not say what its layers do: %s", link.rank, error or "no answer in time")
        return []
    return found


def _probe(reason: str | None, good: str, details: dict[str, Any]) -> Response:
    if reason is None:
        return JSONResponse({"status": good, **details})
    content = {"status": f"not {good}", "reason": reason, **details}
    return JSONResponse(content, status_code=503, headers={"retry-after": RETRY_AFTER_SECONDS})


def _unhealthy_reason(state: ServerState) -> str | None:
    """Draining is healthy: running requests must be left to end."""
    if state.draining:
        return state.client.stalled(state.stall_timeout)
    return state.unready_reason() or state.client.stalled(state.stall_timeout)


def _failing(state: ServerState) -> dict[str, Any]:
    """Replicas whose last start failed, if there are any: others serve, and yet somebody has to look."""
    failing = [{"rank": link.rank, "error": link.failure} for link in state.client.links if link.failure]
    return {"failing": failing} if failing else {}


def _progress(state: ServerState) -> dict[str, Any]:
    engines = [
        {
            "engine": link.rank,
            "state": link.condition,
            "running": link.stats.num_running,
            "waiting": link.stats.num_waiting,
            "steps": link.stats.num_steps,
        }
        for link in state.client.links
    ]
    return {"engines": engines}
