"""Writes the choices of /v1/chat/completions, whole or chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UnsetType

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.text.output_processor import Delta
from fourfold_server.answer_writer import AnswerHead
from fourfold_server.logprobs import chat_logprobs, prompt_logprobs
from fourfold_server.preparation import Prompt
from fourfold_server.schemas_chat import ChatChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage
from fourfold_server.usage import Usage


class ChatWriter:
    """One request's answer. The first chunk of each choice says the role."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, prompt: Prompt, values: Mapping[str, Any]) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._logprobs = values["logprobs"]
        self._token_ids = values["return_token_ids"]
        self._prompt_logprobs = values["prompt_logprobs"] is not None
        self._begun: set[int] = set()

    def whole(self, deltas: Mapping[int, Delta], usage: Usage) -> bytes:
        """The answer to a request that is not streamed."""
        choices = []
        for index in sorted(deltas):
            choice = self._choice(index, deltas[index])
            choice.message = ChatMessage(content=deltas[index].text)
            choices.append(choice)
        answer = self._answer("chat.completion", choices, usage)
        if self._prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, deltas[0].prompt_logprobs)
        if self._token_ids:
            answer.prompt_token_ids = self._prompt.token_ids
        return msgspec.json.encode(answer)

    def chunks(self, index: int, delta: Delta) -> list[bytes]:
        """What is new of one choice."""
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            opening = ChatChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            answer = self._answer("chat.completion.chunk", [opening], self._head.no_usage)
            if self._token_ids:
                answer.prompt_token_ids = self._prompt.token_ids
            chunks.append(msgspec.json.encode(answer))
        if delta.text or delta.finish_reason or ((self._logprobs or self._token_ids) and delta.token_ids):
            choice = self._choice(index, delta)
            choice.delta = ChatDelta(content=delta.text) if delta.text else ChatDelta()
            answer = self._answer("chat.completion.chunk", [choice], self._head.no_usage)
            chunks.append(msgspec.json.encode(answer))
        return chunks

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk that ends a stream with usage."""
        return msgspec.json.encode(self._answer("chat.completion.chunk", [], usage))

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        choice = ChatChoice(index=index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if self._logprobs:
            choice.logprobs = ChatLogprobs(content=chat_logprobs(self._tokenizer, delta.logprobs))
        if self._token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _answer(self, kind: str, choices: list[ChatChoice], usage: Usage | UnsetType | None) -> ChatCompletion:
        head = self._head
        return ChatCompletion(
            id=head.request_id, object=kind, created=head.created, model=head.model, choices=choices, usage=usage
        )
