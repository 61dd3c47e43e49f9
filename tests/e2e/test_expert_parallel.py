"""Experts spread over ranks say what the dense model says, whatever carries the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM

from .conftest import ONE_THREAD
from .test_tensor_parallel import IDS, answers, expected

WIRED = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
CUTS: dict[str, dict[str, Any]] = {
    "sums": WIRED,
    "peer memory": {**WIRED, "all_to_all": "shm", "expert_placement": "round-robin"},
    "uneven copies": {**WIRED, "all_to_all": "all_to_all_single", "moe_ep_redundant_experts": 2},
}
MORE_CUTS: dict[str, dict[str, Any]] = {
    "gathered": {**WIRED, "all_to_all": "allgather_reducescatter"},
    "over tcp": {**WIRED, "all_to_all": "all_to_all_single", "comm": "gloo"},
    "one rank": {"enable_expert_parallel": True},
    "stages": {**WIRED, "all_to_all": "shm", "pipeline_parallel_size": 2},
    "three ranks": {**WIRED, "all_to_all": "shm", "tensor_parallel_size": 3},
}


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
