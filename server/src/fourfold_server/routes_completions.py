"""/v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fourfold.errors import RequestError
from fourfold_server.completion_writer import CompletionWriter
from fourfold_server.documentation import json_answers, request_body
from fourfold_server.generating_request import GeneratingRequest
from fourfold_server.preparation import build_requests, check_choices, encode_prompts, new_id
from fourfold_server.schemas_completion import COMPLETION_FIELDS, Completion
from fourfold_server.state import ServerState
from fourfold_server.streaming import answer

EXAMPLE = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}


def completions_router(state: ServerState) -> APIRouter:
    """POST /v1/completions."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        summary="Go on from text or token ids",
        openapi_extra=request_body(COMPLETION_FIELDS, EXAMPLE),
        responses=json_answers(Completion, stream=True),
        response_class=Response,
    )
    async def create_completion(request: Request) -> Response:
        return await _complete(state, request)

    return router


async def _complete(state: ServerState, http: Request) -> Response:
    request = await GeneratingRequest.read(state, http, COMPLETION_FIELDS)
    model, values = request.model, request.values
    _check_combinations(values)
    check_choices(values["n"], len(values["prompt"]))
    limit = request.admit()
    prompts = await state.text_pool.run(
        encode_prompts, model, values["prompt"], limit=limit, add_special_tokens=values["add_special_tokens"]
    )
    request_id = new_id("cmpl")
    requests = build_requests(
        state,
        model,
        prompts,
        values,
        request_id=request_id,
        limit=limit,
        max_tokens=values["max_tokens"],
        logprobs=values["logprobs"],
        prompt_logprobs=_prompt_logprobs(values),
    )
    return await answer(
        request, request_id, prompts, requests, lambda head: CompletionWriter(head, model.tokenizer, prompts, values)
    )


def _prompt_logprobs(values: dict[str, Any]) -> int | None:
    """Echoed prompts are scored like the output."""
    wanted = [values["prompt_logprobs"], values["logprobs"] if values["echo"] else None]
    return max((count for count in wanted if count is not None), default=None)


def _check_combinations(values: dict[str, Any]) -> None:
    if values["best_of"] is not None and values["best_of"] != values["n"]:
        raise RequestError(
            f"best_of is {values['best_of']} and n is {values['n']}; only equal values are supported",
            parameter="best_of",
        )
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream", parameter="prompt_logprobs")
