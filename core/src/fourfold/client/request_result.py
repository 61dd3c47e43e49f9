"""What offline generation returns."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    """Up to and including the token that ended the output."""
    logprobs: list[TokenLogprobs] | None
    """One a token, if asked for."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token id that ended it; None for eos and for length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestResult:
    """One prompt and its choices."""

    prompt: str | None
    """None for a prompt of token ids or of messages."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """One a prompt token, the first None, if asked for."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache by the first choice."""
    outputs: list[CompletionOutput]
    """In order of index."""
