"""/v1/chat/completions as data: the fields of a request and the shape of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from fourfold.errors import RequestError
from fourfold.sampling_params import MAX_LOGPROBS
from fourfold_server.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Field,
    Kind,
    Table,
    read_fields,
    refused,
    without_effect,
    wrong_type,
)
from fourfold_server.sampling_fields import REQUEST, SAMPLING
from fourfold_server.usage import Usage

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOLS: Final = "Tools."


def _read_content(path: str, value: Any) -> str:
    """Text, or text in parts, which belong together as they stand."""
    if isinstance(value, str):
        return str(STRING.read(path, value))
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or a list of text parts is needed")
    texts: list[str] = []
    for index, part in enumerate(value):
        place = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise wrong_type(place, part, "a part such as {'type': 'text', 'text': ...} is needed")
        if part.get("type") != "text":
            raise RequestError(
                f"{place} is of type {part.get('type')!r}; only text parts are supported", parameter=place
            )
        texts.append(STRING.read(f"{place}.text", part.get("text")))
    return "".join(texts)


CONTENT: Final = Kind(
    _read_content,
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                },
            },
        ]
    },
)


def _read_role(path: str, value: Any) -> str:
    if value not in ROLES:
        raise wrong_type(path, value, f"one of {', '.join(ROLES)} is needed")
    return str(value)


MESSAGE_FIELDS: Final[Table] = {
    "role": Field(kind=Kind(_read_role, {"enum": list(ROLES)}), doc=f"one of {', '.join(ROLES)}.", required=True),
    "content": Field(kind=CONTENT, doc="Text."),
    "name": Field(kind=STRING, doc="Who speaks; templates may show it."),
    "tool_call_id": Field(kind=STRING, doc="With role tool: the call that is answered."),
    "reasoning_content": Field(kind=STRING, doc="Earlier reasoning; templates may show it."),
    "refusal": refused("An earlier refusal.", harmless=("",)),
    "tool_calls": refused(_TOOLS, harmless=([],)),
    "function_call": refused(_TOOLS),
    "audio": refused("Audio.", harmless=()),
    "annotations": refused("Citations of an earlier answer.", harmless=([],)),
}


def _read_messages(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(path, value, "a list of messages is needed")
    if not value:
        raise RequestError(f"{path} is empty; at least one message is needed", parameter=path)
    return value


MESSAGES: Final = Kind(_read_messages, {"type": "array", "minItems": 1})


def read_messages(messages: list[Any], *, strict: bool, ignored: list[str]) -> list[dict[str, Any]]:
    """Check each message; contents become text, absent fields stay absent. Raises RequestError."""
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise wrong_type(place, message, "an object with role and content is needed")
        read = read_fields(MESSAGE_FIELDS, message, strict=strict, path=f"{place}.")
        ignored += read.ignored
        values = {name: value for name, value in read.values.items() if value is not None}
        if "content" not in values:
            if values["role"] != "assistant":
                raise RequestError(f"{place}.content is missing or null", parameter=f"{place}.content")
            values["content"] = ""
        for refused_name in ("refusal", "tool_calls", "annotations"):
            values.pop(refused_name, None)
        result.append(values)
    return result


TEMPLATE_FIELDS: Final[Table] = {
    "messages": Field(kind=MESSAGES, doc="the conversation so far, a list of messages.", required=True),
    "add_generation_prompt": Field(
        kind=BOOLEAN, doc="Whether the prompt ends with the start of an answer; default true."
    ),
    "continue_final_message": Field(
        kind=BOOLEAN, doc="Whether the answer goes on within the last, assistant's, message.", default=False
    ),
    "chat_template_kwargs": Field(kind=OBJECT, doc="Further variables for the template.", default={}),
}

CHAT_FIELDS: Final[Table] = {
    "model": REQUEST["model"],
    **TEMPLATE_FIELDS,
    "max_completion_tokens": Field(
        kind=INTEGER, doc="Output tokens at most; cut to what the context holds. Default: all that it holds."
    ),
    "max_tokens": Field(kind=INTEGER, doc="The older name of max_completion_tokens."),
    "logprobs": Field(kind=BOOLEAN, doc="Whether to send log probabilities of the output.", default=False),
    "top_logprobs": Field(kind=INTEGER, doc=f"With logprobs: of this many likeliest, 0 to {MAX_LOGPROBS}."),
    "response_format": refused("The form of the answer.", harmless=({"type": "text"},)),
    "tools": refused(_TOOLS, harmless=([],)),
    "tool_choice": refused(_TOOLS, harmless=("none",)),
    "functions": refused(_TOOLS, harmless=([],)),
    "function_call": refused(_TOOLS, harmless=("none",)),
    "modalities": refused("Kinds of output.", harmless=(["text"],)),
    "audio": refused("Audio output."),
    "prediction": refused("Predicted output."),
    "web_search_options": refused("Web search."),
    "moderation": refused("Moderation of the answer."),
    "reasoning_effort": refused("Effort of reasoning; see chat_template_kwargs.", harmless=("none",)),
    "verbosity": refused("Length of the answer.", harmless=("medium",)),
    "service_tier": refused("Class of service.", harmless=("auto", "default")),
    "store": Field(kind=BOOLEAN, doc="Whether to keep the answer; nothing is kept.", only=(False,)),
    "metadata": without_effect(OBJECT, "Labels of the request."),
    "parallel_tool_calls": without_effect(BOOLEAN, "Whether several tools may be called at once."),
    "prompt_cache_key": without_effect(STRING, "A hint for caching; every prompt is looked up in the cache."),
    "prompt_cache_options": without_effect(OBJECT, "Options for caching."),
    "prompt_cache_retention": without_effect(STRING, "How long to cache."),
    "safety_identifier": without_effect(STRING, "An identifier of the end user."),
    **{name: field for name, field in REQUEST.items() if name != "model"},
    **SAMPLING,
}


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, kw_only=True):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One item a token."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's answer."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice, with ``message``, or what is new of it, with ``delta``."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
