"""Writes the choices of /v1/chat/completions, whole or chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.text.output_processor import Delta
from fourfold_server.logprobs import chat_logprobs, prompt_logprobs
from fourfold_server.preparation import Prompt
from fourfold_server.schemas_chat import ChatChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage
from fourfold_server.usage import Usage


class ChatWriter:
    """One request's answer. The first chunk of each choice says the role."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        values: Mapping[str, Any],
        *,
        request_id: str,
        created: int,
        include_usage: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._values = values
        self._id = request_id
        self._created = created
        # With usage to come, chunks before it say that there is none yet.
        self._no_usage = None if include_usage else UNSET
        self._begun: set[int] = set()

    def whole(self, deltas: Mapping[int, Delta], usage: Usage) -> bytes:
        """The answer to a request that is not streamed."""
        choices = []
        for index in sorted(deltas):
            choice = self._choice(index, deltas[index])
            choice.message = ChatMessage(content=deltas[index].text)
            choices.append(choice)
        answer = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._values["model"],
            choices=choices,
            usage=usage,
        )
        if self._values["prompt_logprobs"] is not None:
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, deltas[0].prompt_logprobs)
        if self._values["return_token_ids"]:
            answer.prompt_token_ids = self._prompt.token_ids
        return msgspec.json.encode(answer)

    def chunks(self, index: int, delta: Delta) -> list[bytes]:
        """What is new of one choice."""
        events = []
        if index not in self._begun:
            self._begun.add(index)
            opening = ChatChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            events.append(self._event([opening], self._no_usage))
        values = self._values
        if delta.text or delta.finish_reason or values["logprobs"] or values["return_token_ids"]:
            choice = self._choice(index, delta)
            choice.delta = ChatDelta(content=delta.text) if delta.text else ChatDelta()
            events.append(self._event([choice], self._no_usage))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk that ends a stream with usage."""
        return self._event([], usage)
