"""A mixture of experts whose experts are all the embedded model's feed-forward says what that model says, however it is
cut; one with stacked experts sleeps, is saved in parts, and loaded again.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fourfold import LLM, SamplingParams
from fourfold.models.mixture_families import describe_qwen_moe
from fourfold.models.tensor_table import checkpoint_tensors

from .conftest import ONE_THREAD
from .test_tensor_parallel import IDS, answers, expected

CUTS: dict[str, dict[str, Any]] = {
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
MORE_CUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp 3": {"tensor_parallel_size": 3},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 3, tp 2": {"pipeline_parallel_size": 3, "tensor_parallel_size": 2},
}


@pytest.fixture
def stacked(tiny_model: Path, tmp_path: Path) -> Path:
    """A random Qwen 2 MoE with the experts of a layer in two tensors."""
    folder = tmp_path / "stacked"
    shutil.copytree(tiny_model, folder)
    config = {
        **json.loads((folder / "config.json").read_text()),
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, shape in checkpoint_tensors(describe_qwen_moe(config)).items():
        values = torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        expert = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if expert is None:
            tensors[name] = values
        else:
            experts.setdefault(f"{expert[1]}.{expert[2]}", []).append(values)
    for name in [name.removesuffix(".gate_proj") for name in experts if name.endswith(".gate_proj")]:
        gates, ups = experts[f"{name}.gate_proj"], experts[f"{name}.up_proj"]
        tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        tensors[f"{name}.down_proj"] = torch.stack(experts[f"{name}.down_proj"])
    save_file(tensors, folder / "model.safetensors")
    return folder


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


def test_stacked_experts_are_read_again_after_sleep_and_at_another_cut(stacked: Path, tmp_path: Path) -> None:
    def ids(llm: LLM) -> list[int]:
        return list(llm.generate("a b c", SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].token_ids)

    small = {"dtype": "float32", "kv_cache_memory": 4 << 20}
    with LLM(str(stacked), **small) as llm:
        expected = ids(llm)
        llm.sleep(level=2)
        llm.wake_up()
        assert ids(llm) == expected
    with LLM(str(stacked), tensor_parallel_size=2, **small) as llm:
        assert ids(llm) == expected
        llm.save_sharded_state(tmp_path / "saved")
    with LLM(str(tmp_path / "saved"), **small) as llm:
        assert ids(llm) == expected
