from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from fourfold.checkpoints.gguf_file import GgufFile
from fourfold.checkpoints.gguf_pre_tokenizers import pre_tokenizer
from fourfold.checkpoints.gguf_tokenizer import build_tokenizer, generation_config, tokenizer_config
from fourfold.errors import CheckpointError

Write = Callable[..., Path]


def opened(write_gguf: Write, tokenizer: Callable[[gguf.GGUFWriter], None] | None = None, **more: Any) -> GgufFile:
    if tokenizer is not None:
        more["tokenizer"] = tokenizer
    return GgufFile(write_gguf({}, **more))


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("smollm", "a12 b", ["a", "1", "2", "Ġb"]),
        ("smollm", "a   2", ["a", "ĠĠĠ", "2"]),
        ("gpt-2", "a12 don't", ["a", "12", "Ġdon", "'t"]),
        ("llama-bpe", "a1234 DON'T\n\nx", ["a", "123", "4", "ĠDON", "'T", "ĊĊ", "x"]),
        ("qwen2", "a123 x", ["a", "1", "2", "3", "Ġx"]),
        ("tekken", "aBCd12/x", ["a", "BCd", "1", "2", "/x"]),
        ("default", "a,b 12345", ["a", ",", "b", "Ġ", "123", "45"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, pieces: list[str]) -> None:
    cut = pre_tokenizers.Sequence(pre_tokenizer(name, "x.gguf")).pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_unknown_pre_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf has pre-tokenizer 'klingon'; supported: .*smollm"):
        pre_tokenizer("klingon", "x.gguf")


def test_byte_level(write_gguf: Write) -> None:
    file = opened(write_gguf)
    tokenizer = build_tokenizer(file)
    assert tokenizer.encode("ab a12<|end|><tool>").ids == [6, 8, 10, 11, 2, 3]
    assert tokenizer.decode([6, 8, 10, 11]) == "ab a12"
    added = tokenizer.get_added_tokens_decoder()
    assert {token for token, added_token in added.items() if added_token.special} == {0, 1, 2}
    assert not added[3].special
    assert tokenizer_config(file)["eos_token"] == "<|end|>"
    assert generation_config(file) == {"eos_token_id": [2], "bos_token_id": 1}


def test_every_kind_of_end_token_ends(write_gguf: Write) -> None:
    file = opened(write_gguf, keys=lambda writer: writer.add_eot_token_id(0))
    assert generation_config(file)["eos_token_id"] == [0, 2]


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab", "ba"]


def sentence_piece(writer: gguf.GGUFWriter) -> None:
    first = len(SPM) - 7
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM)
    # A higher score merges first: "ba" before "ab".
    scores = {"ba": -1.0, "ab": -2.0, "▁a": -3.0, "▁ab": -4.0}
    writer.add_token_scores([scores.get(token, -100.0) for token in SPM])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(SPM) - first)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentence_piece(write_gguf: Write) -> None:
    tokenizer = build_tokenizer(opened(write_gguf, sentence_piece))
    texts = [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("ab bab").ids]
    assert texts == ["<s>", "▁ab", "▁", "ba", "b"]
    assert tokenizer.decode(tokenizer.encode("ab bab é").ids) == "ab bab é"
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]


def test_sentence_piece_without_a_leading_space(write_gguf: Write) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        sentence_piece(writer)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    tokenizer = build_tokenizer(opened(write_gguf, keys))
    assert tokenizer.encode("ab").tokens == ["ab", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_what_cannot_be_built(write_gguf: Write) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        build_tokenizer(GgufFile(write_gguf({}, tokenizer=None)))

    def wordpiece(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    with pytest.raises(CheckpointError, match="a tokenizer of kind 'bert'; supported: gpt2, llama"):
        build_tokenizer(opened(write_gguf, wordpiece))

    def no_scores(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a"])

    with pytest.raises(CheckpointError, match="has 1 tokens and 0 scores"):
        build_tokenizer(opened(write_gguf, no_scores))
