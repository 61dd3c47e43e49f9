"""Log probabilities in the forms that the OpenAI API shows. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.contracts.tokenizer import Tokenizer
from fourfold.messages import TokenLogprobs
from fourfold.text.output_processor import PlacedLogprobs
from fourfold_server.schemas_chat import ChatLogprob, TopLogprob
from fourfold_server.schemas_completion import CompletionLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[PlacedLogprobs]) -> list[ChatLogprob]:
    """One item a token, with its alternatives."""
    items = []
    for position in positions:
        scored = position.logprobs
        piece = tokenizer.token_bytes(scored.token_id)
        items.append(
            ChatLogprob(
                token=piece.decode("utf-8", "replace"),
                logprob=_finite(scored.logprob),
                bytes=list(piece),
                top_logprobs=[_top_logprob(tokenizer, token_id, logprob) for token_id, logprob in scored.top],
            )
        )
    return items


def completion_logprobs(
    tokenizer: Tokenizer, positions: Sequence[tuple[TokenLogprobs | int, int]], *, with_top: bool
) -> CompletionLogprobs:
    """``positions``: (scores, or a bare token id where there are none, and the place in the text).

    ``with_top`` false leaves out the alternatives, which were not asked for.
    """
    result = CompletionLogprobs(top_logprobs=[] if with_top else None)
    for scored, offset in positions:
        token_id = scored if isinstance(scored, int) else scored.token_id
        result.tokens.append(_token_name(tokenizer, token_id))
        result.token_logprobs.append(None if isinstance(scored, int) else _finite(scored.logprob))
        result.text_offset.append(offset)
        if result.top_logprobs is not None:
            result.top_logprobs.append(None if isinstance(scored, int) else _top_names(tokenizer, scored))
    return result


def prompt_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None]:
    """One item a prompt token: token id -> its log probability, rank and text; the first has none."""
    items: list[dict[str, Any] | None] = []
    for scored in positions or ():
        if scored is None:
            items.append(None)
            continue
        ranks = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(scored.top, 1)}
        ranks.setdefault(scored.token_id, (scored.rank, scored.logprob))
        items.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
                }
                for token_id, (rank, logprob) in ranks.items()
            }
        )
    return items


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    piece = tokenizer.token_bytes(token_id)
    return TopLogprob(token=piece.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(piece))


def _top_names(tokenizer: Tokenizer, scored: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens, and the one that came if it is none of them."""
    names = {_token_name(tokenizer, token_id): _finite(logprob) for token_id, logprob in scored.top}
    names.setdefault(_token_name(tokenizer, scored.token_id), _finite(scored.logprob))
    return names


def _token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; parts of a character are shown as bytes, so that different tokens have different names."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
