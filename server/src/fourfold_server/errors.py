"""Every failure as an OpenAI error object. Knows no route."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold.errors import EngineError, ExecutorFailed, RequestError

RETRY_AFTER_SECONDS = "1"
MAX_MESSAGE = 2000
"""Characters; messages quote what clients send, which may be megabytes."""
MAX_PARAMETER = 200

logger = logging.getLogger(__name__)


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer that is no success."""

    error: ErrorObject


def error_body(error: Exception) -> bytes:
    """The JSON of an error; nothing of an unexpected one is shown but that it happened."""
    status = error_status(error)
    parameter = error.parameter if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else None
    known = isinstance(error, RequestError | EngineError)
    message = str(error) if known else "the server failed on this request; its log says why"
    shown = ErrorObject(
        message=_shortened(message, MAX_MESSAGE),
        type=_error_type(status),
        param=None if parameter is None else _shortened(parameter, MAX_PARAMETER),
        code=code,
    )
    return msgspec.json.encode(ErrorBody(error=shown))


def error_status(error: Exception) -> int:
    """The HTTP status of an error; an engine that has died is started again, so that trying later helps."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, ExecutorFailed) else 500


def error_response(error: Exception, *, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for an error; 429 and 503 say when to try again."""
    status = error_status(error)
    shown = dict(headers or {})
    if status in (429, 503):
        shown["retry-after"] = RETRY_AFTER_SECONDS
    if status == 401:
        shown["www-authenticate"] = "Bearer"
    return Response(error_body(error), status_code=status, headers=shown, media_type="application/json")


async def answer_request_error(request: Request, error: Exception) -> Response:
    """An exception handler for errors that say what they are."""
    return error_response(error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """An exception handler for what the router refuses: unknown paths and wrong methods."""
    if not isinstance(error, HTTPException):
        raise error
    path, method = request.scope["path"], request.method
    if error.status_code == 404:
        refused = RequestError(f"no route {path!r}; see /docs", code="not_found", status=404)
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refused = RequestError(f"{path} takes no {method}; allowed: {allowed}", code="method_not_allowed", status=405)
    else:
        refused = RequestError(str(error.detail), status=error.status_code)
    return error_response(refused, headers=error.headers)


class ErrorBoundary:
    """Turns what nothing else caught into an answer with status 500, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            # Only the end of the HTTP server cancels, once the time to answer is over; its last word is ours.
            if not started:
                await error_response(RequestError("the server is shutting down", status=503))(scope, receive, send)
        except RequestError as error:
            if not started:
                await error_response(error)(scope, receive, send)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await error_response(error)(scope, receive, send)


def _shortened(text: str, limit: int) -> str:
    """Both ends: a message ends with what to do."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
