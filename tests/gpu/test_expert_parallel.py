"""Experts spread over two devices say what one device says, in one batch or two, recorded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams

from .test_engine import some_prompts

pytestmark = pytest.mark.multi_gpu
CUT: dict[str, Any] = {"tensor_parallel_size": 2, "executor": "mp", "comm": "nccl"}
SPREAD = {**CUT, "enable_expert_parallel": True}
PEER = {**SPREAD, "all_to_all": "peer"}
MICROBATCHES = {"enable_dbo": True, "dbo_decode_tokens": 4, "dbo_prefill_tokens": 32}
CUTS: dict[str, dict[str, Any]] = {
    "cut, microbatches": {**CUT, **MICROBATCHES},
    "sums": SPREAD,
    "sums, microbatches": {**SPREAD, **MICROBATCHES},
    "peer": PEER,
    "peer, eager": {**PEER, "enforce_eager": True},
    "peer, microbatches": {**PEER, **MICROBATCHES},
    "peer, microbatches, eager": {**PEER, **MICROBATCHES, "enforce_eager": True},
    "gathered, microbatches": {**SPREAD, **MICROBATCHES, "all_to_all": "allgather_reducescatter"},
}


def ids(model: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    common = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
    }
    with LLM(str(model), **common, **options) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(some_prompts(), params)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """What one device says, once it has been asked."""
    return {}


@pytest.mark.parametrize("cut", CUTS)
def test_two_devices_say_what_one_says(mixture: Path, expected: dict[str, list[list[int]]], cut: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two CUDA devices")
    if not expected:
        expected["one device"] = ids(mixture)
        torch.cuda.empty_cache()
    assert len({str(one) for one in expected["one device"]}) > 1
    assert ids(mixture, **CUTS[cut]) == expected["one device"]
