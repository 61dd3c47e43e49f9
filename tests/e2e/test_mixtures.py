"""A mixture of experts whose experts are all the embedded model's feed-forward says what that model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM
from fourfold.testing.upcycling import upcycle

from .conftest import ONE_THREAD
from .test_tensor_parallel import IDS, answers, expected

CUTS: dict[str, dict[str, Any]] = {
    "tp 3": {"tensor_parallel_size": 3},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
MORE_CUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 3, tp 2": {"pipeline_parallel_size": 3, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts, of which a token takes two."""
    return upcycle(tmp_path_factory.mktemp("upcycled") / "smollm2-moe", num_experts=3)


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of several ranks that wait for each other on few cores take many times as long."""
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("cut", [*CUTS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_CUTS)])
def test_golden_cases(cut: str, upcycled: Path) -> None:
    with LLM(str(upcycled), dtype="float32", **{**CUTS, **MORE_CUTS}[cut]) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS
