"""/v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from fourfold.supervision.deployment_state import WishedAdapter
from fourfold_server.state import ServerState


def models_router(state: ServerState) -> APIRouter:
    """GET /v1/models and /v1/models/{name}. They list names, whether or not the model is ready."""
    router = APIRouter()

    @router.get("/v1/models", summary="The names that requests may use")
    async def list_models() -> JSONResponse:
        models = [_model(state, name) for name in state.served_names]
        models += [_model(state, adapter.name, adapter) for adapter in state.adapters]
        return JSONResponse({"object": "list", "data": models})

    @router.get("/v1/models/{name:path}", summary="One of these names")
    async def show_model(name: str) -> JSONResponse:
        return JSONResponse(_model(state, name, state.find_adapter(name)))

    return router


def _model(state: ServerState, name: str, adapter: WishedAdapter | None = None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "fourfold",
        "root": state.served_names[0] if adapter is None else adapter.folder,
        "parent": None if adapter is None else state.served_names[0],
        "max_model_len": state.client.max_model_len,
    }
