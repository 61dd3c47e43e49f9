"""What operators do to a running deployment. The API key, if there is one, guards it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from fourfold.contracts.load_balancer import EngineState
from fourfold.errors import RequestError
from fourfold_server.replica_choice import check_rank
from fourfold_server.state import ServerState


def admin_router(state: ServerState) -> APIRouter:
    """/admin."""
    router = APIRouter()

    @router.post("/admin/replicas/{rank}/restart", summary="Restart a replica once its requests have ended")
    async def restart_replica(rank: str) -> Response:
        return JSONResponse(_restart(state, rank), status_code=202)

    return router


def _restart(state: ServerState, value: str) -> dict[str, int | str]:
    """Requests go on; what --drain-timeout leaves unfinished goes on elsewhere. `/topology` shows how it goes."""
    links = state.client.links
    link = links[check_rank(value, state.client.ranks, parameter="rank", status=404)]
    if link.state is not EngineState.READY:
        raise RequestError(f"replica {link.rank} is {link.state}; only a ready one can be restarted", status=409)
    state.restart_engine(link.engine)
    return {"rank": link.rank, "state": str(EngineState.DRAINING)}
