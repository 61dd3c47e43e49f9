"""/v1/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fourfold.errors import RequestError
from fourfold_server.answer_writer import AnswerHead
from fourfold_server.completion_writer import CompletionWriter
from fourfold_server.documentation import json_answers, request_body
from fourfold_server.fields import read_fields
from fourfold_server.generation import Generation
from fourfold_server.json_body import read_json_object
from fourfold_server.preparation import Prompt, build_requests, check_choices, encode_prompts, new_id
from fourfold_server.replica_choice import read_rank
from fourfold_server.reply_headers import ignored_header
from fourfold_server.sampling_fields import check_constants, read_stream_options
from fourfold_server.schemas_completion import COMPLETION_FIELDS, Completion
from fourfold_server.state import ServerState
from fourfold_server.streaming import answer
from fourfold_server.usage import Usage, count_usage

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


async def _complete(state: ServerState, request: Request) -> Response:
    arrival = time.monotonic()
    model = state.serving()
    rank = read_rank(request.headers, len(state.client.links))
    body = await read_json_object(request, state)
    strict = state.config.strict_fields
    values, ignored = read_fields(COMPLETION_FIELDS, body.values, strict=strict)
    include_usage = read_stream_options(values, strict=strict, ignored=ignored)
    _check_combinations(values)
    check_choices(values["n"], len(values["prompt"]))
    check_constants(body.constants)
    state.check_model_name(values["model"])
    limit = state.context_limit()
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
    generation = Generation(state.client, model.tokenizer, state.metrics, requests, arrival=arrival, rank=rank)
    head = AnswerHead(
        request_id=request_id, created=int(time.time()), model=state.served_names[0], include_usage=include_usage
    )
    return await answer(
        request.receive,
        generation,
        CompletionWriter(head, model.tokenizer, prompts, values),
        stream=values["stream"],
        include_usage=include_usage,
        count_usage=lambda: _usage(generation, prompts, values["n"]),
        headers=ignored_header(ignored),
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


def _usage(generation: Generation, prompts: list[Prompt], n: int) -> Usage:
    return count_usage(
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        completion_tokens=generation.completion_tokens,
        cached_tokens=sum(generation.cached_tokens(index * n) for index in range(len(prompts))),
    )
