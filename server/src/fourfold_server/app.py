"""The HTTP application: routes of all plugins behind the same layers. Knows no socket and no process."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fourfold.blame import blame
from fourfold.entries import RoutesEntry
from fourfold.errors import EngineError, RequestError
from fourfold_server.authentication import Authentication, LocalAdministration, is_loopback
from fourfold_server.body_limit import BodyLimit
from fourfold_server.documentation import ERROR_ANSWERS
from fourfold_server.documentation_page import render_page
from fourfold_server.errors import ErrorBoundary, answer_http_error, answer_request_error, error_response
from fourfold_server.plugin import fourfold_routes
from fourfold_server.request_identity import RequestIdentity
from fourfold_server.state import ServerState


def create_app(state: ServerState, routes: Mapping[str, RoutesEntry] | None = None) -> FastAPI:
    """``routes``: what plugins offer, by name, this server's included; None: this server's alone."""
    entries = {entry.name: entry for entry in fourfold_routes()} if routes is None else routes
    app = FastAPI(
        title="fourfold",
        version=version("fourfold-server"),
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own page loads its parts from another host
        redoc_url=None,
        middleware=_layers(state),
        exception_handlers={
            RequestError: answer_request_error,
            EngineError: answer_request_error,
            HTTPException: answer_http_error,
            RequestValidationError: _answer_validation_error,
        },
    )
    for _, entry in sorted(entries.items()):
        with blame(f"routes {entry.name!r}"):
            # Errors are the same everywhere, and FastAPI adds none of its own where 4XX are described.
            app.include_router(entry.build(state), responses=ERROR_ANSWERS)

    async def show_documentation(request: Request) -> Response:
        return HTMLResponse(render_page(app.openapi()))

    app.add_route("/docs", show_documentation, include_in_schema=False)
    return app


def _layers(state: ServerState) -> list[Middleware]:
    """Outermost first: whatever a later layer refuses, an earlier one still identifies and counts."""
    layers = [Middleware(RequestIdentity, metrics=state.metrics), Middleware(ErrorBoundary)]
    if state.config.api_key is not None:
        layers.append(Middleware(Authentication, api_key=state.config.api_key))
    elif not is_loopback(state.config.host):
        layers.append(Middleware(LocalAdministration))
    layers.append(Middleware(BodyLimit, max_bytes=state.config.max_body_bytes))
    return layers


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's own checks, which only plugins' routes use, answer 422; OpenAI's clients know 400."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return error_response(RequestError(f"{place or 'the body'}: {first['msg']}", parameter=place or None))
