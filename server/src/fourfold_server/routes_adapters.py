"""LoRA adapters while the server runs: loading and unloading, under the paths that vLLM has for them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fourfold.errors import RequestError
from fourfold_server.adapter_name import fault_of_name
from fourfold_server.documentation import request_body
from fourfold_server.fields import STRING, Field, Table
from fourfold_server.json_body import read_json_object
from fourfold_server.routes_admin import read_text_fields
from fourfold_server.state import ServerState

_UNLOAD_FIELDS: Final[Table] = {
    "lora_name": Field(kind=STRING, doc="what requests call the adapter, as their model.", required=True)
}
_LOAD_FIELDS: Final[Table] = {
    **_UNLOAD_FIELDS,
    "lora_path": Field(kind=STRING, doc="a folder of the server's machine, in PEFT's format.", required=True),
}


def adapters_router(state: ServerState) -> APIRouter:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter; for operators, as the routes below /admin."""
    router = APIRouter()

    @router.post(
        "/v1/load_lora_adapter",
        summary="Serve a LoRA adapter as a model",
        openapi_extra=request_body(_LOAD_FIELDS, {"lora_name": "sql", "lora_path": "/adapters/sql"}),
    )
    async def load_adapter(request: Request) -> Response:
        body = await read_json_object(request, state)
        fields = read_text_fields(body.values, _LOAD_FIELDS)
        fault = fault_of_name(fields["lora_name"])
        if fault is not None:
            raise RequestError(f"lora_name {fields['lora_name']!r:.100} {fault}", parameter="lora_name")
        await state.operations.load_adapter(fields["lora_name"], fields["lora_path"], state.served_names)
        return PlainTextResponse(f"LoRA adapter {fields['lora_name']!r} is loaded")

    @router.post(
        "/v1/unload_lora_adapter",
        summary="Serve a LoRA adapter no longer",
        openapi_extra=request_body(_UNLOAD_FIELDS, {"lora_name": "sql"}),
    )
    async def unload_adapter(request: Request) -> Response:
        body = await read_json_object(request, state)
        name = read_text_fields(body.values, _UNLOAD_FIELDS)["lora_name"]
        await state.operations.unload_adapter(name)
        return PlainTextResponse(f"LoRA adapter {name!r} is unloaded")

    return router
