from __future__ import annotations

import pytest

from fourfold.errors import RequestError
from fourfold.testing.fake_tokenizer import FakeTokenizer
from fourfold_server.context_length import BLOCK_CHARACTERS, WHOLE_CHARACTERS, refuse_oversized, room_for_output


class CountingTokenizer(FakeTokenizer):
    """Remembers how much text it was given."""

    def __init__(self) -> None:
        super().__init__([" " * 16])
        self.num_characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.num_characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)


def test_a_text_far_too_long_is_refused_after_a_part_of_it() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(RequestError, match=r"256 tokens, but the prompt has more than \d+ tokens \(1000000") as caught:
        refuse_oversized(tokenizer, "a" * 1_000_000, 256, parameter="prompt")
    assert (caught.value.code, caught.value.parameter) == ("context_length_exceeded", "prompt")
    assert tokenizer.num_characters == BLOCK_CHARACTERS


def test_other_texts_are_left_to_be_counted_exactly() -> None:
    tokenizer = CountingTokenizer()
    refuse_oversized(tokenizer, "a" * WHOLE_CHARACTERS, 256, parameter="prompt")
    assert tokenizer.num_characters == 0
    refuse_oversized(tokenizer, " " * (WHOLE_CHARACTERS + 16), 20_000, parameter="prompt")


@pytest.mark.parametrize(("prompt", "wanted", "room"), [(255, 16, 1), (1, None, 255), (250, 6, 6), (250, 2, 2)])
def test_room(prompt: int, wanted: int | None, room: int) -> None:
    assert room_for_output(prompt, wanted, 256, strict=False, parameter="prompt") == room


def test_no_room() -> None:
    with pytest.raises(RequestError, match="256 tokens, but the prompt has 256 tokens"):
        room_for_output(256, 1, 256, strict=False, parameter="prompt")
    with pytest.raises(RequestError, match="max_tokens is 7; at most 6 fit"):
        room_for_output(250, 7, 256, strict=True, parameter="prompt")
    assert room_for_output(250, None, 256, strict=True, parameter="prompt") == 6
