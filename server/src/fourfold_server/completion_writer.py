"""Writes the choices of /v1/completions, whole or chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.messages import TokenLogprobs
from fourfold.text.detokenizer import decode_pieces
from fourfold.text.output_processor import Delta
from fourfold_server.answer_writer import AnswerHead
from fourfold_server.logprobs import completion_logprobs, prompt_logprobs
from fourfold_server.preparation import Prompt
from fourfold_server.schemas_completion import Completion, CompletionChoice, CompletionLogprobs
from fourfold_server.usage import Usage


class CompletionWriter:
    """One request's answer. Keeps for each choice whether its start, such as the echoed prompt, was written."""

    def __init__(
        self, head: AnswerHead, tokenizer: Tokenizer, prompts: Sequence[Prompt], values: Mapping[str, Any]
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._values = values
        self._begun: set[int] = set()
        self._echoes: dict[int, _Echo] = {}

    def whole(self, deltas: Mapping[int, Delta], usage: Usage) -> bytes:
        """The answer to a request that is not streamed."""
        return self._encode([self._choice(index, deltas[index]) for index in sorted(deltas)], usage)

    def chunks(self, index: int, delta: Delta) -> list[bytes]:
        """What is new of one choice."""
        values = self._values
        shown = delta.text or delta.finish_reason or (values["echo"] and index not in self._begun)
        if shown or (delta.token_ids and (values["logprobs"] is not None or values["return_token_ids"])):
            return [self._encode([self._choice(index, delta)], self._head.no_usage)]
        return []

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk that ends a stream with usage."""
        return self._encode([], usage)

    def _encode(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        head = self._head
        return msgspec.json.encode(
            Completion(id=head.request_id, created=head.created, model=head.model, choices=choices, usage=usage)
        )

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        values = self._values
        choice = CompletionChoice(
            index=index, text=delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        if values["return_token_ids"]:
            choice.token_ids = delta.token_ids
        first = index not in self._begun
        if first:
            self._begin(index, choice, delta)
        if values["logprobs"] is not None:
            choice.logprobs = self._logprobs(index, delta, with_prompt=first and values["echo"])
        return choice

    def _begin(self, index: int, choice: CompletionChoice, delta: Delta) -> None:
        self._begun.add(index)
        values = self._values
        prompt = self._prompts[index // values["n"]]
        if values["echo"]:
            choice.text = self._echo(index).text + choice.text
        if values["return_token_ids"]:
            choice.prompt_token_ids = prompt.token_ids
        if values["prompt_logprobs"] is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, delta.prompt_logprobs)

    def _logprobs(self, index: int, delta: Delta, *, with_prompt: bool) -> CompletionLogprobs:
        positions: list[tuple[TokenLogprobs | int, int]] = []
        shift = 0
        if self._values["echo"]:
            echo = self._echo(index)
            shift = len(echo.text)
            if with_prompt:
                scores = delta.prompt_logprobs or [None] * len(echo.offsets)
                token_ids = self._prompts[index // self._values["n"]].token_ids
                for token_id, score, offset in zip(token_ids, scores, echo.offsets):
                    positions.append((token_id if score is None else score, offset))
        positions += [(placed.logprobs, shift + placed.text_offset) for placed in delta.logprobs]
        return completion_logprobs(self._tokenizer, positions, with_top=self._values["logprobs"] > 0)

    def _echo(self, index: int) -> _Echo:
        place = index // self._values["n"]
        if place not in self._echoes:
            self._echoes[place] = _Echo(self._tokenizer, self._prompts[place])
        return self._echoes[place]


class _Echo:
    """A prompt as text, and where in it each of its tokens starts."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        pieces = decode_pieces(tokenizer, prompt.token_ids)
        self.text = "".join(pieces) if prompt.text is None else prompt.text
        self.offsets: list[int] = []
        position = 0
        for piece in pieces:
            self.offsets.append(position)
            # A token that the tokenizer added stands nowhere in the client's text.
            if self.text.startswith(piece, position):
                position += len(piece)
