"""The tokenizer ``tokenizers``: a folder's tokenizer.json through the library of that name. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.entries import TokenizerContext

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


class HfTokenizer:
    """See the contract for each method."""

    def __init__(self, context: TokenizerContext) -> None:
        self._path = Path(context.folder) / "tokenizer.json"
        self._tokenizer = _load(self._path)
        self._plain: Tokenizer | None = None
        self._plain_lock = threading.Lock()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self._size = max(ids, default=-1) + 1
        self._bytes: dict[int, bytes] = {}
        self._kind = _token_kind(self._tokenizer)
        self._byte_of = _byte_of_character()

    @property
    def vocabulary_size(self) -> int:
        """The highest id, plus one."""
        return self._size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids; see the contract."""
        tokenizer = self._tokenizer if parse_special else self._plain_tokenizer()
        # A batch of one, as it lets other threads run meanwhile, and the fast way counts no characters.
        [encoded] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id that is no token's."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "bytes":
            return b"".join(
                bytes((self._byte_of[character],)) if character in self._byte_of else character.encode()
                for character in token
            )
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes.fromhex(match[1])
        return token.replace(_WORD_START, " ").encode()

    def _plain_tokenizer(self) -> Tokenizer:
        """A second tokenizer, since taking special tokens for text is a setting of the whole object."""
        with self._plain_lock:
            if self._plain is None:
                plain = _load(self._path)
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the model needs a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
    # The library would otherwise start a thread for each core of the host, for batches.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_kind(tokenizer: Tokenizer) -> str:
    """``bytes``: a character of a token stands for a byte; ``pieces``: for itself, with byte tokens for the rest."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return "bytes" if any(step.get("type") == "ByteLevel" for step in _steps(decoder)) else "pieces"


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own character, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
