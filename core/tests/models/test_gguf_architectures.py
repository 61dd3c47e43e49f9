"""A GGUF file of each architecture, made from a random reference model, gives that model's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[gguf.GGUFWriter], Any]]] = {
    "llama": ("Llama", {}, lambda w: w.add_rope_freq_base(10000.0)),
    "llama-biased": ("Llama", {"attention_bias": True, "head_dim": 16}, lambda w: w.add_key_length(16)),
    "mistral": ("Mistral", {"sliding_window": 5}, lambda w: w.add_sliding_window(5)),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, lambda w: w.add_rope_freq_base(10000.0)),
    "qwen3": ("Qwen3", {"head_dim": 16}, lambda w: w.add_key_length(16)),
    "gemma": ("Gemma", {"head_dim": 16}, lambda w: w.add_key_length(16)),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5},
        lambda w: [
            w.add_key_length(16),
            w.add_sliding_window(5),
            w.add_attn_logit_softcapping(50.0),
            w.add_final_logit_softcapping(30.0),
        ],
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        lambda w: [
            w.add_key_length(16),
            w.add_sliding_window(5),
            w.add_rope_freq_base(1e6),
            w.add_float32("gemma3.rope.freq_base_swa", 500.0),
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            w.add_rope_scaling_factor(8.0),
        ],
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layer_interval": 4},
        lambda w: w.add_rope_freq_base(2e6),
    ),
}
ARCHITECTURES = {"llama-biased": "llama", "mistral": "llama"}


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of rotate-half order as llama.cpp keeps them: pairs side by side."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write(path: Path, architecture: str, model: Any, keys: Callable[[gguf.GGUFWriter], Any]) -> None:
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    keys(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{place}" for place in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            values = interleaved(values, config.num_attention_heads)
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            values = interleaved(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_source(
    case: str,
    save_random: Callable[..., tuple[Path, Any]],
    reference_logits: Callable[[Any, list[int]], torch.Tensor],
    load_decoder: Callable[..., Any],
    paged: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family, settings, keys = CASES[case]
    _, model = save_random(family, **{**SHAPE, **settings})
    path = tmp_path / "model.gguf"
    write(path, ARCHITECTURES.get(case, case), model, keys)
    ids = list(range(3, 33))
    logits = paged(load_decoder(path)).step({0: ids})
    assert (logits - reference_logits(model, ids)).abs().max() < 1e-3
