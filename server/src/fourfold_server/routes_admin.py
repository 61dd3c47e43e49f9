"""What operators do to a running deployment. The API key, if there is one, guards it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Annotated, Any, Final, TypeVar
from unicodedata import category

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fourfold.contracts.load_balancer import EngineState
from fourfold.errors import RequestError
from fourfold.process_messages import RestartEngine
from fourfold.supervision.deployment_state import changing_state
from fourfold_server.documentation import request_body
from fourfold_server.fields import INTEGER, STRING, Field, Table, list_of
from fourfold_server.json_body import read_json_object
from fourfold_server.replica_choice import check_rank
from fourfold_server.state import ServerState

_RESTART_SECONDS: Final = 0.5
"""Until a replica's end is known here, and no operation can miss it."""
MAX_TEXT = 4096
"""Characters of a field: the longest path that Linux takes."""
_PAUSE_BODY: Final = request_body(
    {"mode": Field(kind=STRING, doc="keep, wait or abort.", default="keep")}, {"mode": "wait"}, required=False
)
_SLEEP_BODY: Final = request_body(
    {"level": Field(kind=INTEGER, doc="1, or 2 for the weights too.", default=1)}, {"level": 2}, required=False
)
_WAKE_BODY: Final = request_body(
    {"tags": Field(kind=list_of(STRING), doc="weights, kv_cache or both; none is all.")},
    {"tags": ["weights"]},
    required=False,
)
_UPDATE_FIELDS: Final[Table] = {
    "model": Field(kind=STRING, doc="a folder, or any name that can be served, of the same model.", required=True)
}
_Value = TypeVar("_Value", int, str, list[str])
_TYPES = {int: "a whole number", str: "a text", list: "a list of texts"}


def admin_router(state: ServerState) -> APIRouter:
    """/admin."""
    router = APIRouter()

    @router.post("/admin/replicas/{rank}/restart", summary="Restart a replica once its requests have ended")
    async def restart_replica(rank: str) -> Response:
        return JSONResponse(await _restart(state, rank), status_code=202)

    @router.post("/admin/reset_prefix_cache", summary="Forget all cached prefixes")
    async def reset_prefix_cache() -> Response:
        await state.operations.reset_prefix_cache()
        return JSONResponse({})

    @router.post(
        "/admin/pause",
        summary="Come to a stop: requests that have begun are kept, waited for, or aborted",
        openapi_extra=_PAUSE_BODY,
    )
    async def pause(request: Request, mode: str = "keep") -> Response:
        await state.operations.pause(await _field_of_body(request, state, "mode", mode))
        return JSONResponse(_pausing(state))

    @router.post("/admin/resume", summary="Go on after a pause")
    async def resume() -> Response:
        await state.operations.resume()
        return JSONResponse(_pausing(state))

    @router.get("/admin/is_paused", summary="Whether the replicas have come to a stop")
    async def is_paused() -> Response:
        await state.catch_up()
        return JSONResponse(_pausing(state))

    @router.post(
        "/admin/sleep",
        summary="Give memory back: of the KV cache, and at level 2 of the weights too",
        openapi_extra=_SLEEP_BODY,
    )
    async def sleep(request: Request, level: int = 1) -> Response:
        await state.operations.sleep(await _field_of_body(request, state, "level", level))
        return JSONResponse(_sleeping(state))

    @router.post(
        "/admin/wake_up",
        summary="Take the memory again: all, or that of tags weights and kv_cache",
        openapi_extra=_WAKE_BODY,
    )
    async def wake_up(
        request: Request,
        tags: Annotated[list[str], Query()] = [],  # noqa: B006 (FastAPI copies it)
    ) -> Response:
        await state.operations.wake_up(await _field_of_body(request, state, "tags", tags))
        return JSONResponse(_sleeping(state))

    @router.get("/admin/is_sleeping", summary="Whether memory was given back, and which")
    async def is_sleeping() -> Response:
        await state.catch_up()
        return JSONResponse(_sleeping(state))

    @router.post(
        "/admin/update_weights",
        summary="Go on with the weights of another checkpoint of the model",
        openapi_extra=request_body(_UPDATE_FIELDS, {"model": "/models/new"}),
    )
    async def update_weights(request: Request) -> Response:
        body = await read_json_object(request, state)
        model = read_text_fields(body.values, _UPDATE_FIELDS)["model"]
        await state.operations.update_weights(model)
        return JSONResponse({"model": model})

    return router


def read_text_fields(body: dict[str, Any], names: Collection[str]) -> dict[str, str]:
    """The fields of a body that has exactly these, each a text that is not empty. Raises RequestError."""
    for name in [*body, *names]:
        if name not in names:
            raise RequestError(f"unknown field {name!r}; the fields are {', '.join(names)}", parameter=name)
        if name not in body:
            raise RequestError(f"{name} is missing; a text", parameter=name)
        if not isinstance(body[name], str) or not body[name].strip():
            raise RequestError(f"{name} is {body[name]!r:.100}; a text that is not empty", parameter=name)
        if len(body[name]) > MAX_TEXT or any(category(one) in ("Cc", "Cs") for one in body[name]):
            raise RequestError(
                f"{name} is {body[name]!r:.100}; {MAX_TEXT} characters at most, and no control characters",
                parameter=name,
            )
    return {name: body[name] for name in names}


async def _field_of_body(request: Request, state: ServerState, name: str, otherwise: _Value) -> _Value:
    """A field of a JSON body, for those who send what belongs into the query there; ``otherwise`` without one.

    Raises RequestError for a body that has anything else, and for a value of another type.
    """
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return otherwise
    body = (await read_json_object(request, state)).values
    for field in body:
        if field != name:
            raise RequestError(f"unknown field {field!r}; the only one is {name}", parameter=field)
    value = body.get(name, otherwise)
    if name in body and name in request.query_params:
        raise RequestError(f"{name} is in the query and in the body; send one of them", parameter=name)
    if type(value) is not type(otherwise):
        raise RequestError(f"{name} is {value!r:.100}; {_TYPES[type(otherwise)]}", parameter=name)
    return value


def _sleeping(state: ServerState) -> dict[str, Any]:
    replicas = [{"rank": link.rank, "asleep": list(link.stats.asleep)} for link in state.client.links]
    return {"is_sleeping": any(replica["asleep"] for replica in replicas), "replicas": replicas}


def _pausing(state: ServerState) -> dict[str, Any]:
    replicas = [{"rank": link.rank, "paused": link.stats.paused} for link in state.client.links]
    return {"is_paused": any(replica["paused"] for replica in replicas), "replicas": replicas}


async def _restart(state: ServerState, value: str) -> dict[str, int | str]:
    """Requests go on; what --drain-timeout leaves unfinished goes on elsewhere. `/topology` shows how it goes."""
    links = state.client.links
    link = links[check_rank(value, state.client.ranks, parameter="rank", status=404)]
    if state.bound:
        raise RequestError(
            f"replica {link.rank} shares its experts with the others; such replicas are not restarted one by one",
            parameter="rank",
        )
    if link.state is not EngineState.READY:
        raise RequestError(f"replica {link.rank} is {link.condition}; only a ready one can be restarted", status=409)
    with changing_state(state.client.run_directory):  # not in the middle of an operation on all replicas
        state.restart_engine(RestartEngine(engine=link.engine))
        deadline = time.monotonic() + _RESTART_SECONDS
        while link.state is EngineState.READY and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
    return {"rank": link.rank, "state": str(EngineState.DRAINING)}
