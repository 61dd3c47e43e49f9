"""The embedded model gives exactly the ids and log probabilities that its reference implementation gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.entries import TokenizerContext
from fourfold.text.hf_tokenizer import HfTokenizer

GREEDY = {
    "The capital of France is": (5, [7042, 30, 198, 198]),
    "1, 2, 3, 4, 5,": (14, [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]),
    "Here is the English alphabet: ABC": (
        7,
        [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74, 198, 198],
    ),
    "♥" * 12: (24, [34625, 115] * 7),
    "1. 日本\n2. 日本\n3. 日本\n4. 日本\n5.": (
        30,
        [17097, 241, 115, 40993, 198, 38, 30, 17097, 241, 115, 40993, 198, 39, 30],
    ),
    "你好 你好 你好 你好 你好 你好": (29, [216, 18645, 250, 48392, 138]),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> HfTokenizer:
    from fourfold import builtin_plugin
    from fourfold.plugins import load_plugins

    registry = load_plugins(entry_points=False, extra={"core": builtin_plugin})
    folder = resolve_checkpoint(ModelConfig(model="smollm2"), registry, NoProgress()).folder
    assert folder.is_relative_to(cache)
    return HfTokenizer(TokenizerContext(folder=str(folder)))


@pytest.fixture(scope="module")
def decoder(cache: Path, module_load_decoder: Callable[..., Any]) -> Any:
    return module_load_decoder("smollm2")


@pytest.mark.parametrize("prompt", GREEDY)
def test_greedy_ids(prompt: str, decoder: Any, tokenizer: HfTokenizer, paged: Any) -> None:
    prompt_tokens, expected = GREEDY[prompt]
    ids = tokenizer.encode(prompt)
    assert len(ids) == prompt_tokens
    steps = paged(decoder)
    logits = steps.step({0: ids})
    produced: list[int] = []
    while len(produced) < len(expected):
        produced.append(int(logits[-1].argmax()))
        logits = steps.step({0: produced[-1:]})
    assert produced == expected


def test_log_probabilities(decoder: Any, tokenizer: HfTokenizer, paged: Any) -> None:
    ids = tokenizer.encode("The capital of France is")
    logprobs = paged(decoder).step({0: ids}).log_softmax(-1)
    prompt = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
    assert prompt == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509], abs=2e-3)
    top = logprobs[-1].topk(5)
    assert top.values.tolist() == pytest.approx([-0.2581, -2.7407, -4.3844, -4.6199, -4.6778], abs=2e-3)
    assert [tokenizer.decode([token]) for token in top.indices.tolist()] == [" Paris", " the", " London", " Le", " New"]


@pytest.mark.parametrize("count", [1, 2, 17])
def test_one_token_a_word(tokenizer: HfTokenizer, count: int) -> None:
    assert len(tokenizer.encode(" hello" * count)) == count


def test_digits_are_single_tokens(tokenizer: HfTokenizer) -> None:
    assert tokenizer.encode("a   2") == [81, 333, 34]


def test_tied_head_shares_the_embedding(decoder: Any) -> None:
    assert decoder._head._weight is decoder._embedding.weight
