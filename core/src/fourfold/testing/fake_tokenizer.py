"""A byte-level tokenizer with a vocabulary that a test chooses. Reads no file."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE = len(SPECIAL_TOKENS)


class FakeTokenizer:
    """Ids 0 to 2 are special tokens, then come the 256 bytes, then ``words``; the longest token that fits is taken."""

    def __init__(self, words: Sequence[str | bytes] = ()) -> None:
        self._pieces = [text.encode() for text in SPECIAL_TOKENS]
        self._pieces += [bytes([byte]) for byte in range(256)]
        self._pieces += [word.encode() if isinstance(word, str) else word for word in words]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces) if token_id >= FIRST_BYTE}
        self._longest = max(map(len, self._ids))
        self._special = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")

    @property
    def vocabulary_size(self) -> int:
        """Special tokens, bytes and words."""
        return len(self._pieces)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids 0 to 2."""
        return frozenset(range(FIRST_BYTE))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids; no special token is ever added."""
        token_ids: list[int] = []
        for part in self._special.split(text) if parse_special else [text]:
            if parse_special and part in SPECIAL_TOKENS:
                token_ids.append(SPECIAL_TOKENS.index(part))
            else:
                token_ids += self._encode_plain(part.encode())
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        shown = [token_id for token_id in token_ids if not (skip_special_tokens and token_id < FIRST_BYTE)]
        return b"".join(self._pieces[token_id] for token_id in shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return self._pieces[token_id]

    def _encode_plain(self, data: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            end = min(start + self._longest, len(data))
            while data[start:end] not in self._ids:
                end -= 1
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids
