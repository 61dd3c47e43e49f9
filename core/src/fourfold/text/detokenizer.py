"""Token ids to text, one token at a time, by bytes: only whole characters come out. Knows no stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from fourfold.contracts.tokenizer import Tokenizer

_decoder_type = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output as it grows.

    Joined, the pieces equal ``bytes.decode("utf-8", "replace")`` of all tokens' bytes, which is what byte-level
    tokenizers decode to. Bytes that begin a character wait for the token that ends it; if none comes, ``finish``
    returns one U+FFFD for them.
    """

    __slots__ = ("_decoder", "_hidden", "_strip_space", "_tokenizer", "length")

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """``prompt_token_ids`` come before the text: after a visible one the text is a continuation."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _decoder_type("replace")
        self._strip_space = not any(token_id not in tokenizer.special_token_ids for token_id in prompt_token_ids)
        self.length = 0
        """Characters returned so far."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often none, sometimes several."""
        if token_id in self._hidden:
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if self._strip_space:
            self._strip_space = False
            if piece.startswith(b" ") and not self._tokenizer.decode([token_id]).startswith(" "):
                # Tokenizers that mark word starts add a space before the first word of a text, and drop it again.
                piece = piece[1:]
        text = self._decoder.decode(piece)
        self.length += len(text)
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What ``push`` would return for one after another, joined."""
        first = 0
        texts = []
        while self._strip_space and first < len(token_ids):
            texts.append(self.push(token_ids[first]))
            first += 1
        token_bytes, hidden = self._tokenizer.token_bytes, self._hidden
        pieces = [token_bytes(token_id) for token_id in token_ids[first:] if token_id not in hidden]
        text = self._decoder.decode(b"".join(pieces))
        self.length += len(text)
        return "".join(texts) + text

    def finish(self) -> str:
        """One U+FFFD if the last token left a character incomplete, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self.length += len(text)
        return text


def decode_pieces(tokenizer: Tokenizer, token_ids: Iterable[int]) -> list[str]:
    """The characters that each token of a whole text completes; an incomplete end goes to the last token."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces
