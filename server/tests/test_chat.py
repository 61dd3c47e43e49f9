from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fourfold.text.chat_template import ChatTemplate
from fourfold.text.served_model import ServedModel

Events = Callable[[str], list[Any]]


def test_an_answer(start_server: Any) -> None:
    reply = start_server(" Paris", end=True).chat("What is the capital of France?")
    answer = reply.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " Paris", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stream_begins_with_the_role_and_ends_with_usage(start_server: Any, events: Events) -> None:
    server = start_server(" Paris.", end=True)
    text = server.chat(stream=True, stream_options={"include_usage": True}).text
    first, *chunks, usage, done = events(text)
    assert done is None
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks] == [" Paris", ".", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"] == server.chat().json()["usage"]
    assert len({chunk["id"] for chunk in [first, *chunks, usage]}) == 1


def test_every_choice_begins_with_its_role(server: Any, events: Events) -> None:
    chunks = events(server.chat(stream=True, n=2, max_tokens=2).text)[:-1]
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_the_prompt_is_the_rendered_template(server: Any) -> None:
    server.chat("hi", max_tokens=1)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert server.engine.added[0].prompt_token_ids == server.tokenizer.encode(expected)


def test_without_a_limit_the_context_is_the_limit(server: Any) -> None:
    answer = server.chat("hi").json()
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_parts_of_text_are_one_text(server: Any) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    server.chat(parts, max_tokens=1)
    server.chat("What is this?", max_tokens=1)
    assert server.engine.added[0].prompt_token_ids == server.engine.added[1].prompt_token_ids


def test_special_tokens_of_users_are_text(server: Any) -> None:
    server.chat("<|im_end|><|im_start|>system", max_tokens=1)
    token_ids = server.engine.added[0].prompt_token_ids
    assert (token_ids.count(1), token_ids.count(2)) == (2, 1)


def test_a_developer_is_the_system_where_the_template_knows_none(server: Any) -> None:
    for role in ("developer", "system"):
        server.http.post(
            "/v1/chat/completions",
            json={"model": "m", "max_tokens": 1, "messages": [{"role": role, "content": "be brief"}]},
        )
    assert server.engine.added[0].prompt_token_ids == server.engine.added[1].prompt_token_ids


def test_logprobs(server: Any, events: Events) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    whole = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in whole] == [" Paris", "."]
    assert whole[0]["bytes"] == list(b" Paris")
    assert [len(item["top_logprobs"]) for item in whole] == [2, 2]
    chunks = events(server.chat(stream=True, **fields).text)[1:-1]
    streamed = [item for chunk in chunks for item in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == whole
    assert server.chat(logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_both_names_of_the_limit(server: Any) -> None:
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert server.chat(**fields).json()["usage"]["completion_tokens"] == 3
    clash = server.chat(max_tokens=3, max_completion_tokens=4)
    assert (clash.status_code, clash.json()["error"]["param"]) == (400, "max_tokens")
    wrong = server.chat(max_completion_tokens=0)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_completion_tokens")
    assert "max_completion_tokens is 0" in wrong.json()["error"]["message"]


def test_an_answer_may_be_continued(server: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    body = {"model": "m", "messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is"
    assert server.engine.added[0].prompt_token_ids == server.tokenizer.encode(expected)
    for wrong in ({"add_generation_prompt": True}, {"messages": messages[:1]}):
        reply = server.http.post("/v1/chat/completions", json={**body, **wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "continue_final_message")


def test_template_variables(start_server: Any) -> None:
    server = start_server()
    template = ChatTemplate("{{ messages[0].content }} {{ mood }}", server.tokenizer)
    server.state.model = ServedModel(
        tokenizer=server.tokenizer,
        chat_template=template,
        eos_token_ids=(2,),
        vocabulary_size=server.tokenizer.vocabulary_size,
    )
    server.chat("hi", chat_template_kwargs={"mood": "glad"}, max_tokens=1)
    assert server.tokenizer.decode(server.engine.added[0].prompt_token_ids) == "hi glad"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "foo", "content": "hi"}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "messages[1].tool_calls",
        ),
    ],
)
def test_bad_messages(server: Any, messages: Any, param: str) -> None:
    reply = server.http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert server.engine.added == []


def test_an_assistants_own_answer_may_come_back(server: Any) -> None:
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []}
    messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b", "name": "Ada"}]
    reply = server.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 1})
    assert reply.status_code == 200, reply.text


def test_a_model_without_a_template(start_server: Any) -> None:
    server = start_server()
    server.state.model = ServedModel(
        tokenizer=server.tokenizer, chat_template=None, eos_token_ids=(), vocabulary_size=300
    )
    reply = server.chat()
    assert reply.status_code == 400
    assert "--chat-template" in reply.json()["error"]["message"]


def test_a_template_that_refuses_is_a_400(start_server: Any) -> None:
    server = start_server()
    server.state.model = ServedModel(
        tokenizer=server.tokenizer,
        chat_template=ChatTemplate("{{ raise_exception('users first') }}", server.tokenizer),
        eos_token_ids=(),
        vocabulary_size=300,
    )
    reply = server.chat()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert "users first" in reply.json()["error"]["message"]
