"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fourfold.errors import RequestError
from fourfold_server.chat_writer import ChatWriter
from fourfold_server.documentation import json_answers, request_body
from fourfold_server.generating_request import GeneratingRequest
from fourfold_server.preparation import build_requests, check_choices, encode_chat, new_id
from fourfold_server.schemas_chat import CHAT_FIELDS, ChatCompletion, read_messages
from fourfold_server.state import ServerState
from fourfold_server.streaming import answer

EXAMPLE = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


def chat_router(state: ServerState) -> APIRouter:
    """POST /v1/chat/completions."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=request_body(CHAT_FIELDS, EXAMPLE),
        responses=json_answers(ChatCompletion, stream=True),
        response_class=Response,
    )
    async def create_chat_completion(request: Request) -> Response:
        return await _chat(state, request)

    return router


async def _chat(state: ServerState, http: Request) -> Response:
    request = await GeneratingRequest.read(state, http, CHAT_FIELDS)
    model, values = request.model, request.values
    messages = read_messages(values["messages"], strict=state.config.strict_fields, ignored=request.ignored)
    logprobs = _logprobs(values)
    max_tokens, its_name = _max_tokens(values)
    check_choices(values["n"], 1)
    limit = request.admit()
    prompt = await state.text_pool.run(encode_chat, model, messages, values, limit=limit)
    request_id = new_id("chatcmpl")
    try:
        requests = build_requests(
            state,
            model,
            [prompt],
            values,
            request_id=request_id,
            limit=limit,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=values["prompt_logprobs"],
        )
    except RequestError as error:
        raise _renamed(error, {"max_tokens": its_name, "logprobs": "top_logprobs"}) from error
    return await answer(
        request, request_id, [prompt], requests, lambda head: ChatWriter(head, model.tokenizer, prompt, values)
    )


def _logprobs(values: dict[str, Any]) -> int | None:
    """How many alternatives to score. Raises RequestError for alternatives without log probabilities."""
    top = values["top_logprobs"]
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream", parameter="prompt_logprobs")
    if top is not None and not values["logprobs"]:
        raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    return (top or 0) if values["logprobs"] else None


def _max_tokens(values: dict[str, Any]) -> tuple[int | None, str]:
    """The limit and the name that it was sent under. Raises RequestError for two that differ."""
    new, old = values["max_completion_tokens"], values["max_tokens"]
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens is {new} and max_tokens, its older name, is {old}; send one", parameter="max_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """The same error under the name that the client used."""
    name = names.get(error.parameter or "")
    if name is None or name == error.parameter:
        return error
    message = str(error).replace(str(error.parameter), name, 1)
    return RequestError(message, parameter=name, code=error.code, status=error.status)
