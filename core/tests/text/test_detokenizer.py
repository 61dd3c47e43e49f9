from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fourfold.testing.fake_tokenizer import FIRST_BYTE, FakeTokenizer
from fourfold.text.detokenizer import Detokenizer, decode_pieces

TOKENIZER = FakeTokenizer([" Paris", "日本", "本".encode()[:2], "本".encode()[2:]])
END = 2


def pieces_of(token_ids: list[int], *, skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, prompt_token_ids=prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


def test_a_character_comes_out_whole_with_its_last_byte() -> None:
    assert pieces_of(TOKENIZER.encode("a♥b")) == ["a", "", "", "♥", "b", ""]


def test_an_incomplete_end_is_one_replacement_character() -> None:
    heart = TOKENIZER.encode("♥")
    assert pieces_of(heart[:2]) == ["", "", "\ufffd"]
    assert pieces_of(heart) == ["", "", "♥", ""]


def test_bytes_that_are_no_text_are_replaced_as_soon_as_that_is_certain() -> None:
    first_byte = TOKENIZER.encode("♥")[0]
    assert pieces_of([first_byte, *TOKENIZER.encode("ab")]) == ["", "\ufffda", "b", ""]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    assert pieces_of([END, *TOKENIZER.encode("a")]) == ["", "a", ""]
    assert pieces_of([END], skip=False) == ["<|im_end|>", ""]


def test_a_special_token_within_a_character_leaves_it_whole() -> None:
    first, second, third = TOKENIZER.encode("♥")
    assert "".join(pieces_of([first, END, second, third])) == "♥"


@given(st.lists(st.integers(FIRST_BYTE, TOKENIZER.vocabulary_size - 1)), st.booleans())
def test_joined_pieces_equal_the_tokenizers_own_text(token_ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(token_ids, skip=skip)) == TOKENIZER.decode(token_ids, skip_special_tokens=skip)


@given(st.text())
def test_whole_characters_are_never_replaced(text: str) -> None:
    pieces = pieces_of(TOKENIZER.encode(text, parse_special=False))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


class WordStarts(FakeTokenizer):
    """Like sentencepiece: words start with a space, which the first word of a text does not show."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:  # type: ignore[override]
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")


def test_the_space_of_a_first_word_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = WordStarts([" Paris"])
    paris = tokenizer.encode(" Paris")[0]
    alone = Detokenizer(tokenizer, prompt_token_ids=[1])
    assert [alone.push(paris), alone.push(paris)] == ["Paris", " Paris"]
    going_on = Detokenizer(tokenizer, prompt_token_ids=[1, paris])
    assert going_on.push(paris) == " Paris"


def test_length_counts_characters_returned() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    lengths = []
    for token_id in TOKENIZER.encode("a♥b"):
        lengths.append(detokenizer.length)
        detokenizer.push(token_id)
    assert [*lengths, detokenizer.length] == [0, 1, 1, 1, 2, 3]


def test_pieces_of_a_whole_text_keep_its_incomplete_end() -> None:
    heart = TOKENIZER.encode("♥")
    assert decode_pieces(TOKENIZER, [*heart, heart[0]]) == ["", "", "♥", "\ufffd"]
    assert decode_pieces(TOKENIZER, []) == []
