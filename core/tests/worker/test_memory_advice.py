from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.config.options import build_engine_config
from fourfold.errors import ConfigError
from fourfold.models.families import describe_llama
from fourfold.worker.memory_advice import (
    cache_does_not_fit,
    explained,
    step_does_not_fit,
    warm_up_does_not_fit,
    weights_do_not_fit,
)

GIB = 2**30
DEVICE: Any = SimpleNamespace(name="cuda:3", dtype=torch.bfloat16, memory_bytes=80 * GIB, free_bytes=GIB)


def test_running_out_of_memory_becomes_advice() -> None:
    with pytest.raises(ConfigError, match="lower something"), explained(lambda: "lower something"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), explained(lambda: "lower something"):
        raise RuntimeError("another")


def test_weights_ask_for_more_ranks() -> None:
    description = describe_llama(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    )
    config = build_engine_config()
    said = weights_do_not_fit(description, config, DEVICE, free=4 * GIB)
    assert said == (
        "the weights take about 14.96 GiB a rank, and cuda:3 had 4.00 GiB free; raise --tensor-parallel-size from 1 to "
        "4 or more"
    )
    said = weights_do_not_fit(description, build_engine_config(tensor_parallel_size=2), DEVICE, free=7 * GIB)
    assert "about 7.48 GiB a rank" in said
    assert said.endswith("from 2 to 4 or more")


def test_steps_ask_for_half() -> None:
    config = build_engine_config(max_num_batched_tokens=16384, max_num_seqs=256)
    said = step_does_not_fit(config, DEVICE)
    assert "--max-num-batched-tokens 16384 and --max-num-seqs 256 does not fit" in said
    assert said.endswith("which has 80.00 GiB; lower them to 8192 and 128")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "lower --gpu-memory-utilization from 0.9 by 0.14, to 0.76"),
        ({"kv_cache_memory": 40 * GIB}, "lower --kv-cache-memory by at least 25%"),
        ({"num_blocks": 1000}, "lower --num-blocks by at least 25%"),
    ],
)
def test_the_cache_asks_for_what_was_given(options: dict[str, int], advice: str) -> None:
    said = cache_does_not_fit(build_engine_config(**options), DEVICE, nbytes=40 * GIB, free=30 * GIB)
    assert said == f"the KV cache takes 40.00 GiB, and cuda:3 had 30.00 GiB free; {advice}"


def test_recorded_steps_ask_for_a_share() -> None:
    said = warm_up_does_not_fit(build_engine_config(), DEVICE)
    assert "has 1.00 GiB free beside weights and KV cache" in said
    assert "lower --gpu-memory-utilization from 0.9 by 0.06, to 0.84, or run without" in said
    assert said.endswith("--enforce-eager")
