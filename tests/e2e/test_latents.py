"""Latent attention: whatever the cut and the cache's form, the same ids, and a cache that holds latents alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams

from .conftest import ONE_THREAD

SETTINGS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CUTS: dict[str, dict[str, Any]] = {
    "heads": {"enable_lora": True},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, pp 2, spread": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
        "all_to_all": "shm",
    },
}


@pytest.fixture
def tiny_latents(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with latent attention and experts in its second layer."""
    folder = tmp_path / "tiny-latents"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SETTINGS))
    return folder


def answers(model: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """The ids of two prompts with a common beginning, one after the other, and what each found in the prefix cache."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    common = "Once upon a time there was a cache that held latents in place of heads, and it was small and fast. "
    with LLM(str(model), load_format="dummy", dtype="float32", num_blocks=600, **options) as llm:
        results = [llm.generate([common + end], params)[0] for end in ("A", "B and C")]
    return [one.outputs[0].token_ids for one in results], [one.num_cached_tokens for one in results]


@pytest.mark.long
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_says_the_same(cut: str, tiny_latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    expected, cached = answers(tiny_latents)
    assert cached[0] == 0 < cached[1]
    assert answers(tiny_latents, **CUTS[cut]) == (expected, cached)
