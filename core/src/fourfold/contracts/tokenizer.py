"""The tokenizer contract. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back; safe to call from several threads."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids. With ``parse_special`` false, text that looks like a special token is plain text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; part of a character where a character spans tokens."""
