"""Every field of the OpenAI API is honoured, refused, or has no effect and says so; none is dropped silently."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_completion_create_params

from fourfold_server.config import ServerConfig
from fourfold_server.fields import Table
from fourfold_server.schemas_chat import CHAT_FIELDS
from fourfold_server.schemas_completion import COMPLETION_FIELDS

HONOURED = {
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "presence_penalty",
    "prompt",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_logprobs",
    "top_p",
}
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "best_of": 3,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prediction": {"type": "content", "content": "a"},
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "service_tier": "priority",
    "store": True,
    "suffix": "end",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}
HARMLESS: dict[str, Any] = {
    "best_of": 1,
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "verbosity": "medium",
}
WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "user": "ada",
}


def openai_fields(module: Any, prefix: str) -> set[str]:
    """What the OpenAI client may send."""
    kinds = [value for name, value in vars(module).items() if name.startswith(prefix) and isinstance(value, type)]
    return {name for kind in kinds for name in kind.__annotations__}


COMPLETION = openai_fields(completion_create_params, "CompletionCreateParams")
CHAT = openai_fields(chat_completion_create_params, "CompletionCreateParams")


def test_the_lists_are_the_clients() -> None:
    assert {"model", "prompt", "stream"} <= COMPLETION
    assert {"model", "messages", "stream"} <= CHAT


@pytest.mark.parametrize(("names", "table"), [(COMPLETION, COMPLETION_FIELDS), (CHAT, CHAT_FIELDS)])
def test_every_field_is_known_and_decided(names: set[str], table: Table) -> None:
    assert names - set(table) == set()
    assert names - HONOURED - set(REFUSED) - set(WITHOUT_EFFECT) == set()


def test_refused_fields(server: Any) -> None:
    for name, value in REFUSED.items():
        send = server.complete if name in COMPLETION else server.chat
        reply = send(**{name: value})
        assert reply.status_code == 400, name
        assert reply.json()["error"]["param"] == name
        assert "supported" in reply.json()["error"]["message"]
        assert send(**{name: None}, max_tokens=1).status_code == 200
    assert all(added.sampling.max_tokens == 1 for added in server.engine.added)


def test_fields_of_other_servers_that_would_change_the_answer_are_refused(server: Any) -> None:
    schema = {"type": "object"}
    fields = {
        "structured_outputs": {"json": schema},
        "guided_json": schema,
        "guided_regex": "a+",
        "guided_choice": ["yes", "no"],
        "guided_grammar": "root ::= 'a'",
        "response_format": {"type": "json_object"},
        "allowed_token_ids": [1],
        "bad_words": ["a"],
        "use_beam_search": True,
        "truncate_prompt_tokens": 1,
    }
    for name, value in fields.items():
        for send in (server.complete, server.chat):
            reply = send(**{name: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), name
            assert send(**{name: None}, max_tokens=1).status_code == 200
    for name, value in {"bad_words": [], "use_beam_search": False}.items():
        assert server.complete(**{name: value}, max_tokens=1).status_code == 200


def test_values_that_ask_for_nothing_are_taken(server: Any) -> None:
    for name, value in HARMLESS.items():
        send = server.complete if name in COMPLETION else server.chat
        reply = send(**{name: value}, max_tokens=1)
        assert reply.status_code == 200, reply.text
        assert "x-fourfold-ignored" not in reply.headers


def test_fields_without_effect_are_named_in_a_header(server: Any) -> None:
    reply = server.chat(**WITHOUT_EFFECT, max_tokens=1)
    assert sorted(reply.headers["x-fourfold-ignored"].split(", ")) == sorted(WITHOUT_EFFECT)
    assert server.complete(user="ada", max_tokens=1).headers["x-fourfold-ignored"] == "user"
    assert "x-fourfold-ignored" not in server.complete(user=None, max_tokens=1).headers


def test_unknown_fields_are_named_in_a_header_streamed_or_not(server: Any) -> None:
    fields = {"foo": 1, "großes, böses\n": 2, "stream_options": {"include_usage": True, "bar": 1}}
    reply = server.complete(stream=True, max_tokens=1, **fields)
    assert reply.headers["x-fourfold-ignored"] == "foo, gro\\xdfes? b\\xf6ses?, stream_options.bar"
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a", "mood": "glad"}]}
    assert server.http.post("/v1/chat/completions", json=body).headers["x-fourfold-ignored"] == "messages[0].mood"


def test_strict_fields_refuse_unknown_ones(start_server: Any) -> None:
    server = start_server(config=ServerConfig(strict_fields=True))
    reply = server.complete(foo=1)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "foo")
    reply = server.complete(stream=True, stream_options={"bar": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options.bar")
    reply = server.chat([{"type": "text", "text": "a"}], user="ada", max_tokens=1)
    assert reply.status_code == 200


def test_every_table_documents_its_fields() -> None:
    for table in (COMPLETION_FIELDS, CHAT_FIELDS):
        for name, field in table.items():
            assert field.doc.endswith("."), name
