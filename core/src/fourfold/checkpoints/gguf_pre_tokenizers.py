"""How byte-level BPE models cut a text before merging, by the name that GGUF files give it (``tokenizer.ggml.pre``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN_REST = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2_NAMES = ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "jina-es", "jina-de", "trillion")
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "dbrx"),
        (f"{_CONTRACTIONS}|{_WORDS_AND_REST % '{1,3}'}",),
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (f"{_CONTRACTIONS}|{_WORDS_AND_REST % ''}",)),
    "tekken": (f"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*|" + _TEKKEN_REST,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def pre_tokenizer(name: str, where: str) -> list[PreTokenizer]:
    """The steps of pre-tokenizer ``name``, the last of which maps bytes to characters.

    Raises CheckpointError for an unknown name: a text cut otherwise gives other ids, and nobody would notice.
    """
    from tokenizers import Regex, pre_tokenizers

    if name in _DIGITS:
        # Every digit is a token of its own; without this step " 12" and "  2" come out wrong, silently.
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if name in _GPT2_NAMES:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if name not in _PATTERNS:
        known = sorted((*_DIGITS, *_GPT2_NAMES, *_PATTERNS))
        raise CheckpointError(f"{where} has pre-tokenizer {name!r}; supported: {', '.join(known)}")
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
