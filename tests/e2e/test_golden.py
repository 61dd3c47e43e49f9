"""The embedded model says what it must, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.testing.golden import CHATS, COMPLETIONS

from .running_server import Server, Stream, chat


def answer(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    """Text, finish reason and usage of an answer that is not streamed."""
    with server.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], reply.json()["usage"]


def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    stream = Stream(server, path, {**body, "stream_options": {"include_usage": True}})
    stream.join()
    assert (stream.status, stream.done, stream.error) == (200, True, None)
    reasons = [
        choice["finish_reason"]
        for event in stream.events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert len(reasons) == 1
    return stream.text, reasons[0], stream.events[-1]["usage"]


@pytest.mark.parametrize("ask", [answer, streamed])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(server: Server, name: str, ask: Any) -> None:
    prompt, prompt_tokens, max_tokens, expected = COMPLETIONS[name]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    text, reason, usage = ask(server, "/v1/completions", body)
    assert (text, reason) == (expected, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, max_tokens)


@pytest.mark.parametrize("ask", [answer, streamed])
@pytest.mark.parametrize("name", CHATS)
def test_chats(server: Server, name: str, ask: Any) -> None:
    question, prompt_tokens, completion_tokens, expected = CHATS[name]
    text, reason, usage = ask(server, "/v1/chat/completions", {**chat(question), "model": "smollm2"})
    assert (text, reason) == (expected, "stop")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, completion_tokens)


def test_all_at_once(server: Server) -> None:
    """A batch of everything gives the texts that each gives alone."""
    streams = {
        name: Stream(
            server,
            "/v1/completions",
            {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
        )
        for name, (prompt, _, max_tokens, _) in COMPLETIONS.items()
    }
    for stream in streams.values():
        stream.join()
    assert {name: stream.text for name, stream in streams.items()} == {
        name: expected for name, (_, _, _, expected) in COMPLETIONS.items()
    }
