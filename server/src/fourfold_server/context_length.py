"""Whether a prompt and its output fit the context, and what to say if not. Knows no request."""

from __future__ import annotations

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.errors import RequestError

CODE = "context_length_exceeded"
WHOLE_CHARACTERS = 262_144
"""Texts up to this size are tokenized whatever the context, which takes some 2 s: their error says their length."""
CHARACTERS_PER_TOKEN = 8
"""Twice what languages take; texts that need more are counted block by block before they are tokenized."""
BLOCK_CHARACTERS = 65_536
BLOCK_SLACK = 64
"""Tokens by which cutting a text in two may lengthen it; no vocabulary has many longer tokens."""


def refuse_oversized(tokenizer: Tokenizer, text: str, limit: int, *, parameter: str) -> None:
    """Raise RequestError for a text that is far beyond ``limit`` tokens, without tokenizing all of it.

    Millions of characters take a tokenizer many seconds, for which other requests would wait.
    """
    if len(text) <= max(WHOLE_CHARACTERS, CHARACTERS_PER_TOKEN * limit):
        return
    count = 0
    for start in range(0, len(text), BLOCK_CHARACTERS):
        block = text[start : start + BLOCK_CHARACTERS]
        count += max(0, len(tokenizer.encode(block, add_special_tokens=False)) - BLOCK_SLACK)
        if count > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens, but the prompt has more than {count} tokens "
                f"({len(text)} characters); shorten the prompt",
                parameter=parameter,
                code=CODE,
            )


def room_for_output(num_prompt_tokens: int, max_tokens: int | None, limit: int, *, strict: bool, parameter: str) -> int:
    """Output tokens that the context holds and the client wants; None wants all.

    Raises RequestError that names ``parameter`` if it holds none, and with ``strict`` if it holds fewer than wanted.
    """
    room = limit - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, but the prompt has {num_prompt_tokens} tokens, "
            "which leaves none for the output; shorten the prompt",
            parameter=parameter,
            code=CODE,
        )
    if max_tokens is None or max_tokens <= room:
        return room if max_tokens is None else max_tokens
    if strict:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, but the prompt has {num_prompt_tokens} and "
            f"max_tokens is {max_tokens}; at most {room} fit",
            parameter="max_tokens",
            code=CODE,
        )
    return room
