from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fourfold.entries import TokenizerContext
from fourfold.errors import CheckpointError
from fourfold.text.hf_tokenizer import HfTokenizer

Save = Callable[[Tokenizer], HfTokenizer]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def run(tokenizer: Tokenizer) -> HfTokenizer:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return HfTokenizer(TokenizerContext(folder=str(tmp_path)))

    return run


def byte_level() -> Tokenizer:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{character: 1 + place for place, character in enumerate(characters)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    return tokenizer


def pieces() -> Tokenizer:
    tokens = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", "\u2581ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("\u2581a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@pytest.mark.parametrize("build", [byte_level, pieces])
@pytest.mark.parametrize("text", ["ab a", "日本 ♥", "x\ny", "é<0x41>", "🎉"])
def test_bytes_of_tokens_join_to_the_text(save: Save, build: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = save(build())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.decode(ids) == text


def test_special_text_is_a_token_or_plain_text(save: Save) -> None:
    tokenizer = save(byte_level())
    assert tokenizer.special_token_ids == {0}
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [0]
    plain = tokenizer.encode("<|end|>", add_special_tokens=False, parse_special=False)
    assert 0 not in plain
    assert tokenizer.decode(plain) == "<|end|>"
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [0], "asking for plain text changes nothing"


def test_special_tokens_are_added_on_request_and_skipped(save: Save) -> None:
    tokenizer = save(byte_level())
    ids = tokenizer.encode("a")
    assert ids[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|end|>a"
    assert tokenizer.token_bytes(0) == b"<|end|>"


def test_truncation_and_padding_of_the_file_are_off(save: Save) -> None:
    assert len(save(byte_level()).encode("abcdefgh", add_special_tokens=False)) == 8


def test_ids_past_the_vocabulary(save: Save) -> None:
    tokenizer = save(byte_level())
    assert tokenizer.vocabulary_size == 258
    assert tokenizer.token_bytes(257) == b"<tool>"
    assert tokenizer.token_bytes(258) == b""


def test_missing_and_corrupt_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        HfTokenizer(TokenizerContext(folder=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        HfTokenizer(TokenizerContext(folder=str(tmp_path)))


def test_imports_no_torch() -> None:
    code = "import fourfold.text.hf_tokenizer, fourfold.checkpoints.resolve, fourfold.models.families, sys"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_other_threads_run_while_it_encodes(save: Save) -> None:
    tokenizer = save(byte_level())
    turns, done = 0, threading.Event()

    def work() -> None:
        tokenizer.encode("abc " * 50_000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():  # a tokenizer that keeps the interpreter to itself leaves this loop one turn or two
        turns += 1
    thread.join()
    assert turns > 500
