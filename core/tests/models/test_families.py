"""Every family against transformers: whole prompts, prompts in chunks, decodes, and batches of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SaveRandom = Callable[..., tuple[Path, Any]]
Reference = Callable[[Any, list[int]], torch.Tensor]

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "Llama", {}),
    ("mha", "Llama", {"num_key_value_heads": 6}),
    ("biased-tied", "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("head-dim", "Llama", {"head_dim": 16, "rope_theta": 500.0, "rms_norm_eps": 1e-3}),
    ("gelu", "Llama", {"hidden_act": "gelu"}),
    ("linear", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("dynamic-within", "Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama3", "Llama", {"rope_scaling": LLAMA3}),
    ("yarn", "Llama", {"rope_scaling": YARN}),
    ("yarn-temperature", "Llama", {"rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6}}),
    ("yarn-betas", "Llama", {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3}}),
    ("sliding", "Mistral", {"sliding_window": 9}),
    ("whole", "Mistral", {"sliding_window": None, "head_dim": 16}),
    ("default-window", "Mistral", {}),
    ("plain", "Qwen2", {"tie_word_embeddings": True}),
    ("sliding", "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("unused-window", "Qwen2", {"use_sliding_window": False, "sliding_window": 7}),
    ("plain", "Qwen3", {"head_dim": 16}),
    ("biased", "Qwen3", {"head_dim": 16, "attention_bias": True}),
    ("nope", "SmolLM3", {"no_rope_layer_interval": 2}),
    ("nope-list", "SmolLM3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False}),
    ("nope-sliding", "SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6}),
    ("plain", "Gemma", {"head_dim": 16}),
    ("plain", "Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    ("caps", "Gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("no-caps", "Gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    (
        "plain",
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    (
        "scaled",
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 5.0,
        },
    ),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("family", "settings"), [one[1:] for one in FAMILIES], ids=[f"{b}-{a}" for a, b, _ in FAMILIES]
)
def test_logits_equal_transformers(
    family: str,
    settings: dict[str, Any],
    save_random: SaveRandom,
    reference_logits: Reference,
    load_decoder: Callable[..., Any],
    paged: Any,
) -> None:
    folder, model = save_random(family, **{**SMALL, **settings})
    ids = prompt(45)
    expected = reference_logits(model, ids)
    assert expected.std() > 0.05, "a model whose logits are all alike tests nothing"
    decoder = load_decoder(folder)

    whole = paged(decoder).step({0: ids})
    assert (whole - expected).abs().max() < 1e-3

    chunked = paged(decoder)
    pieces = [chunked.step({0: ids[:17]}), chunked.step({0: ids[17:33]})]
    pieces += [chunked.step({0: [token]}) for token in ids[33:]]
    assert (torch.cat(pieces) - expected).abs().max() < 1e-3


def test_batch_of_prefills_and_decodes_equals_each_alone(
    save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, model = save_random("Mistral", **SMALL, sliding_window=9)
    prompts = [prompt(length, seed=length) for length in (37, 5, 21, 18)]
    batch = paged(load_decoder(folder), num_sequences=4)
    first = batch.step({0: prompts[0][:20], 1: prompts[1][:4], 2: prompts[2][:20]})
    # Decodes before, between and after prefills, in another order than the cache was filled in.
    second = batch.step({1: prompts[1][4:], 0: prompts[0][20:36], 2: prompts[2][20:], 3: prompts[3][:17]})
    third = batch.step({3: prompts[3][17:], 0: prompts[0][36:]})
    expected = [reference_logits(model, ids) for ids in prompts]
    wanted_first = torch.cat([expected[0][:20], expected[1][:4], expected[2][:20]])
    wanted_second = torch.cat([expected[1][4:], expected[0][20:36], expected[2][20:], expected[3][:17]])
    assert (first - wanted_first).abs().max() < 1e-3
    assert (second - wanted_second).abs().max() < 1e-3
    assert (third - torch.cat([expected[3][17:], expected[0][36:]])).abs().max() < 1e-3


def test_dynamic_scaling_beyond_training_equals_transformers_at_the_served_length(
    save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    settings = {**SMALL, "max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    folder, model = save_random("Llama", **settings)
    ids = prompt(60)
    expected = reference_logits(model, ids)
    assert (paged(load_decoder(folder, max_model_len=60)).step({0: ids}) - expected).abs().max() < 1e-3
    assert load_decoder(folder).description.max_model_len == 32


def test_sharded_index(
    save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, model = save_random("Qwen3", shard="60KB", **SMALL, head_dim=16)
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = prompt(20)
    logits = paged(load_decoder(folder)).step({0: ids})
    assert (logits - reference_logits(model, ids)).abs().max() < 1e-3


def test_bfloat16_stays_near_float32(
    save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, model = save_random("Llama", **SMALL)
    ids = prompt(20)
    logits = paged(load_decoder(folder, dtype=torch.bfloat16)).step({0: ids})
    assert logits.dtype == torch.float32
    expected = reference_logits(model, ids)
    assert (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 0.15
