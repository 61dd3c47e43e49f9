"""/v1/completions as data: the fields of a request and the shape of its answers."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from fourfold.errors import RequestError
from fourfold.sampling_params import MAX_LOGPROBS
from fourfold_server.fields import BOOLEAN, INTEGER, STRING, Field, Kind, Table, refused, shown, wrong_type
from fourfold_server.sampling_fields import REQUEST, SAMPLING
from fourfold_server.usage import Usage


def _read_prompts(path: str, value: Any) -> list[str] | list[list[int]]:
    """One or several prompts, each a string or a list of token ids; returned as several."""
    if isinstance(value, str):
        return [STRING.read(path, value)]
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string, a list of strings, token ids, or lists of token ids are needed")
    if not value:
        raise RequestError(f"{path} is an empty list; prompt 0 needs at least one token", parameter=path)
    if type(value[0]) is int:
        return [_read_token_ids(path, value, "prompt 0")]
    if isinstance(value[0], list):
        return [_read_token_ids(path, item, f"prompt {index}") for index, item in enumerate(value)]
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise RequestError(
                f"{path}[{index}] is {shown(item)}; a list is all strings, all token ids, or all lists of them",
                parameter=path,
            )
        try:
            STRING.read(f"{path}[{index}]", item)
        except RequestError as error:
            raise RequestError(str(error), parameter=path) from error
    return value


def _read_token_ids(path: str, value: Any, place: str = "") -> list[int]:
    place = place or path
    if not isinstance(value, list):
        raise RequestError(f"{place} is no list of token ids", parameter=path)
    if not value:
        raise RequestError(f"{place} is an empty list; it needs at least one token", parameter=path)
    wrong = next((item for item in value if type(item) is not int), None)
    if wrong is not None or None in value:
        raise RequestError(f"{place} has {shown(wrong)}, which is no token id", parameter=path)
    return value


TOKEN_IDS: Final = Kind(_read_token_ids, {"type": "array", "items": {"type": "integer"}, "minItems": 1})
PROMPTS: Final = Kind(
    _read_prompts,
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            TOKEN_IDS.schema,
            {"type": "array", "items": TOKEN_IDS.schema, "minItems": 1},
        ]
    },
)

COMPLETION_FIELDS: Final[Table] = {
    "model": REQUEST["model"],
    "prompt": Field(kind=PROMPTS, doc="text or token ids to go on from, or a list of either.", required=True),
    "max_tokens": Field(kind=INTEGER, doc="Output tokens at most; cut to what the context holds.", default=16),
    "echo": Field(kind=BOOLEAN, doc="Whether the text begins with the prompt.", default=False),
    "logprobs": Field(
        kind=INTEGER, doc=f"Log probabilities of each token and of this many likeliest, 0 to {MAX_LOGPROBS}."
    ),
    "best_of": Field(kind=INTEGER, doc="Only a value equal to n is supported."),
    "suffix": refused("Text after the completion.", harmless=("",)),
    "response_format": refused("The form of the answer.", harmless=({"type": "text"},)),
    "add_special_tokens": Field(
        kind=BOOLEAN, doc="Whether the tokenizer adds its special tokens to text prompts.", default=True
    ),
    **{name: field for name, field in REQUEST.items() if name != "model"},
    **SAMPLING,
}


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists of equal length."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer, or one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
