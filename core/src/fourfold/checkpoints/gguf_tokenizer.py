"""Builds a tokenizer, and the settings that come with it, from a GGUF file's metadata. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.gguf_pre_tokenizers import pre_tokenizer
from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fourfold.checkpoints.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the metadata describes. Raises CheckpointError for kinds that cannot be expressed."""
    kind = file.get("tokenizer.ggml.model")
    tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise CheckpointError(f"{file.path} has no tokenizer (key tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens)
    else:
        raise CheckpointError(f"{file.path} has a tokenizer of kind {kind!r}; supported: gpt2, llama")
    _add_special_tokens(tokenizer, file, tokens)
    _add_template(tokenizer, file, tokens)
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What tokenizer_config.json says beside the tokenizer itself."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = file.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The ids that begin and end a text."""
    ends = [file.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    config: dict[str, Any] = {"eos_token_id": sorted({end for end in ends if end is not None})}
    if file.get("tokenizer.ggml.bos_token_id") is not None:
        config["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id")
    return config


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges") or []]
    name = file.get("tokenizer.ggml.pre", "default")
    splitter = pre_tokenizer(name, str(file.path))
    tokenizer = Tokenizer(
        models.BPE(_vocabulary(tokens), merges, fuse_unk=False, ignore_merges=name in _BOS_BY_DEFAULT)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE with byte fallback; merges follow from the scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = file.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens and {len(scores)} scores")
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            _vocabulary(tokens),
            _merges(tokens, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    leads = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if leads else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leads else steps)
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others; the best score merges first, as SentencePiece does."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort(key=lambda one: one[:3])
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Text -> id; a text that occurs twice keeps its first id."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    types: list[int] = file.get("tokenizer.ggml.token_type") or []
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    user_defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _add_template(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Put bos and eos around a text where the model was trained so."""
    from tokenizers import processors

    by_default = file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    bos = file.get("tokenizer.ggml.bos_token_id") if file.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = file.get("tokenizer.ggml.eos_token_id") if file.get("tokenizer.ggml.add_eos_token", False) else None
    pieces, ids = ["$A"], {}
    if bos is not None:
        pieces.insert(0, tokens[bos])
        ids[tokens[bos]] = bos
    if eos is not None:
        pieces.append(tokens[eos])
        ids[tokens[eos]] = eos
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(ids.items()))
