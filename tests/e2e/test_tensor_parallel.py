"""The embedded model cut over processes of this host gives the ids that it gives uncut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fourfold import LLM
from fourfold.errors import ConfigError
from fourfold.sampling_params import SamplingParams
from fourfold.testing.golden import CHATS, COMPLETIONS

IDS = [
    [7042, 30, 198, 198],
    [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28],
    [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74, 198, 198],
    [34625, 115] * 7,
    [17097, 241, 115, 40993, 198, 38, 30, 17097, 241, 115, 40993, 198, 39, 30],
    [216, 18645, 250, 48392, 138] * 2,
]
"""Of the completions."""

MICROBATCHES: dict[str, Any] = {"enable_dbo": True, "dbo_decode_tokens": 2, "dbo_prefill_tokens": 2}


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of several ranks that wait for each other on few cores take many times as long."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def answers(llm: LLM) -> list[tuple[str, list[int]]]:
    """Text and ids of every golden case; the completions in one batch, then each chat."""
    prompts, params = zip(
        *((prompt, greedy(max_tokens)) for prompt, _, max_tokens, _ in COMPLETIONS.values()), strict=True
    )
    results: list[Any] = list(llm.generate(list(prompts), list(params)))
    for question, *_ in CHATS.values():
        results += llm.chat([{"role": "user", "content": question}], greedy(40))
    return [(result.outputs[0].text, list(result.outputs[0].token_ids)) for result in results]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def expected() -> Sequence[str]:
    return [case[-1] for case in (*COMPLETIONS.values(), *CHATS.values())]


@pytest.mark.parametrize("tp", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_golden_cases(tp: int) -> None:
    with LLM("smollm2", dtype="float32", tensor_parallel_size=tp) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS


@pytest.mark.long
@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_golden_cases_in_microbatches(comm: str) -> None:
    with LLM("smollm2", dtype="float32", tensor_parallel_size=2, comm=comm, **MICROBATCHES) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS


def test_recorded_steps_and_gloo_agree_in_bfloat16() -> None:
    """Up to the first small margin: these cases have none."""
    options: dict[str, Any]
    for options in ({}, {"comm": "tp=gloo"}, {"debug_collectives": True}, MICROBATCHES):
        with LLM("smollm2", dtype="bfloat16", tensor_parallel_size=2, **options) as llm:
            found = [result.outputs[0].text for result in llm.generate(list(first_prompts()), greedy(4))]
        assert found == [" Paris.\n\n", " 6, "]


def first_prompts() -> Sequence[str]:
    return [COMPLETIONS[name][0] for name in ("G1", "G2")]


def test_more_ranks_than_heads_are_refused_before_anything_starts() -> None:
    message = "--tensor-parallel-size is 16, but the model has 9 query heads; from 1 to 9"
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2", tensor_parallel_size=16)
