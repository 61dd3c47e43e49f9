"""Turns one choice's engine outputs into text, counts and a reason to end. The server and the offline LLM share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.messages import FinishReason, RequestOutput, TokenLogprobs
from fourfold.sampling_params import SamplingParams
from fourfold.text.detokenizer import Detokenizer
from fourfold.text.stop_strings import StopStrings


class PlacedLogprobs(NamedTuple):
    """Log probabilities at one output position, and where its token stands in the text."""

    logprobs: TokenLogprobs
    text_offset: int
    """Characters of the output's whole text, stop strings and held text counted, before the token."""


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the last look. Deltas merge, so that a slow reader costs no queue."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PlacedLogprobs] = field(default_factory=list)
    """One for each of ``token_ids`` if log probabilities were asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended it; None for eos and for length."""
    error: str | None = None
    error_status: int = 500

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.text or self.token_ids or self.finish_reason)

    def merge(self, later: Delta) -> None:
        """Append what came after this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        if later.finish_reason is not None:
            self.finish_reason = later.finish_reason
            self.stop_reason = later.stop_reason
            self.error = later.error
            self.error_status = later.error_status


class OutputProcessor:
    """The text side of one choice, from its first token to its finish reason."""

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_stop", "finish_reason", "num_cached_tokens", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._include = sampling.include_stop_str_in_output
        self._stop = StopStrings(sampling.stop, include=self._include)
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0
        """Output tokens, up to and including the one that ended the output."""
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def looks_at_text(self) -> bool:
        """Whether a text can end the output, so that it must be known after every token."""
        return self._stop.any

    def process(self, output: RequestOutput) -> Delta:
        """What one engine output adds. Tokens after a matched stop string are dropped; so are later outputs.

        When the result has a finish reason that ``output`` has not, a stop string matched and the engine still works
        on the request: the caller must abort it there.
        """
        delta = Delta(prompt_logprobs=output.prompt_logprobs, num_cached_tokens=output.num_cached_tokens)
        if self.finish_reason is not None:
            return delta
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        # A stop token is no part of the text unless asked for; only the last token of an output can be one.
        stopped = output.finish_reason is FinishReason.STOP and not self._include
        if not self.looks_at_text and output.logprobs is None:
            visible = output.token_ids[:-1] if stopped else output.token_ids
            delta.token_ids = list(output.token_ids)
            self.num_tokens += len(output.token_ids)
            texts = [self._detokenizer.push_all(visible)]
            if output.finish_reason is not None:
                self._end(output, texts, delta)
            delta.text = "".join(texts)
            return delta
        stopped_at = len(output.token_ids) - 1 if stopped else -1
        texts = []
        for index, token_id in enumerate(output.token_ids):
            if output.logprobs is not None:
                delta.logprobs.append(PlacedLogprobs(output.logprobs[index], self._detokenizer.length))
            delta.token_ids.append(token_id)
            self.num_tokens += 1
            if index == stopped_at:
                continue
            if self._push(token_id, texts, delta):
                break
        if self.finish_reason is None and output.finish_reason is not None:
            self._end(output, texts, delta)
        delta.text = "".join(texts)
        return delta

    def _push(self, token_id: int, texts: list[str], delta: Delta) -> bool:
        """Add one token's text; returns whether a stop string ended the output."""
        text = self._detokenizer.push(token_id)
        if self.num_tokens < self._min_tokens:
            texts.append(self._stop.skip(text))
            return False
        released = self._stop.push(text)
        texts.append(released.text)
        if released.match is None:
            return False
        self.finish_reason = delta.finish_reason = FinishReason.STOP
        delta.stop_reason = released.match
        return True

    def _end(self, output: RequestOutput, texts: list[str], delta: Delta) -> None:
        """Release what was held, and take over why the engine ended the request."""
        texts.append(self._stop.finish() + self._detokenizer.finish())
        self.finish_reason = delta.finish_reason = output.finish_reason
        delta.stop_reason = output.stop_token_id
        delta.error, delta.error_status = output.error, output.error_status
