"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from fourfold.errors import RequestError
from fourfold.text.served_model import ServedModel
from fourfold_server.context_length import refuse_oversized
from fourfold_server.documentation import json_answers, request_body
from fourfold_server.fields import BOOLEAN, STRING, Field, Table
from fourfold_server.preparation import check_token_ids, encode_chat
from fourfold_server.reply_headers import ignored_header
from fourfold_server.request_fields import read_request_fields
from fourfold_server.sampling_fields import REQUEST, check_constants
from fourfold_server.schemas_chat import TEMPLATE_FIELDS, read_messages
from fourfold_server.schemas_completion import TOKEN_IDS
from fourfold_server.state import ServerState

_MODEL: Final = Field(kind=STRING, doc=f"Optional; {REQUEST['model'].doc}")
TOKENIZE_FIELDS: Final[Table] = {
    "model": _MODEL,
    "prompt": Field(kind=STRING, doc="Text; this or messages."),
    **TEMPLATE_FIELDS,
    "messages": Field(kind=TEMPLATE_FIELDS["messages"].kind, doc="A chat; this or prompt."),
    "add_special_tokens": Field(
        kind=BOOLEAN, doc="Whether the tokenizer adds its special tokens to a prompt.", default=True
    ),
    "return_token_strs": Field(kind=BOOLEAN, doc="Whether to send each token's text.", default=False),
}
DETOKENIZE_FIELDS: Final[Table] = {
    "model": _MODEL,
    "tokens": Field(kind=TOKEN_IDS, doc="token ids.", required=True),
    "skip_special_tokens": Field(kind=BOOLEAN, doc="Whether special tokens are left out.", default=False),
}


class Tokens(msgspec.Struct, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


def tokenize_router(state: ServerState) -> APIRouter:
    """POST /tokenize and /detokenize."""
    router = APIRouter()

    @router.post(
        "/tokenize",
        summary="Text or a chat to token ids",
        openapi_extra=request_body(TOKENIZE_FIELDS, {"prompt": "The capital of France is"}),
        responses=json_answers(Tokens),
        response_class=Response,
    )
    async def tokenize(request: Request) -> Response:
        return await _answer(state, request, TOKENIZE_FIELDS, _tokenize)

    @router.post(
        "/detokenize",
        summary="Token ids to text",
        openapi_extra=request_body(DETOKENIZE_FIELDS, {"tokens": [504, 3575, 282, 4649, 314]}),
        responses=json_answers(Text),
        response_class=Response,
    )
    async def detokenize(request: Request) -> Response:
        return await _answer(state, request, DETOKENIZE_FIELDS, _detokenize)

    return router


async def _answer(
    state: ServerState,
    request: Request,
    table: Table,
    work: Callable[[ServerState, ServedModel, dict[str, Any], bool, list[str]], msgspec.Struct],
) -> Response:
    model = state.serving()
    values, ignored, constants = await read_request_fields(request, state, table)
    strict = state.config.strict_fields
    check_constants(constants)
    if values["model"] is not None:
        state.find_adapter(values["model"])  # which refuses a name that nobody has
    result = await state.text_pool.run(work, state, model, values, strict, ignored)
    return Response(msgspec.json.encode(result), media_type="application/json", headers=ignored_header(ignored))


def _tokenize(
    state: ServerState, model: ServedModel, values: dict[str, Any], strict: bool, ignored: list[str]
) -> Tokens:
    prompt, messages, limit = values["prompt"], values["messages"], state.context_limit()
    if (prompt is None) == (messages is None):
        raise RequestError("send prompt or messages, and not both", parameter="prompt")
    if prompt is not None:
        refuse_oversized(model.tokenizer, prompt, limit, parameter="prompt")
        token_ids = model.tokenizer.encode(prompt, add_special_tokens=values["add_special_tokens"])
    else:
        read = read_messages(messages, strict=strict, ignored=ignored)
        token_ids = encode_chat(model, read, values, limit=limit).token_ids
    result = Tokens(count=len(token_ids), max_model_len=limit, tokens=token_ids)
    if values["return_token_strs"]:
        result.token_strs = [model.tokenizer.token_bytes(item).decode("utf-8", "replace") for item in token_ids]
    return result


def _detokenize(
    state: ServerState, model: ServedModel, values: dict[str, Any], strict: bool, ignored: list[str]
) -> Text:
    token_ids = values["tokens"]
    check_token_ids(token_ids, model.vocabulary_size, place="tokens", parameter="tokens")
    return Text(prompt=model.tokenizer.decode(token_ids, skip_special_tokens=values["skip_special_tokens"]))
