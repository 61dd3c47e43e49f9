"""Token counts of one answer, as the OpenAI API shows them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """What is known of the prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Each prompt counts once, whatever ``n``; eos counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def count_usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The three counts and their sum."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
