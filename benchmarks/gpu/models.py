"""Public model shapes, written as folders that need no weights, and what a device can do at best with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BANDWIDTH = 4.2e12
"""Bytes a second, reading and writing counted, of a device-to-device copy on the H200 that this was measured on."""
PRODUCT = 780e12
"""FLOP/s of a large bf16 matrix product there."""

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts in place of every feed-forward."""

    count: int
    each: int
    """Of a token."""
    inner: int

    def config(self) -> dict[str, Any]:
        """What it adds to config.json."""
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.each,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder."""

    architecture: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    theta: float
    epsilon: float
    tied: bool
    scaling: dict[str, Any] | None = None
    mixture: Mixture | None = None

    def config(self) -> dict[str, Any]:
        """As in config.json."""
        config = COMMON | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rope_theta": self.theta,
            "rms_norm_eps": self.epsilon,
            "tie_word_embeddings": self.tied,
        }
        config |= {"rope_scaling": self.scaling} if self.scaling else {}
        return config | (self.mixture.config() if self.mixture else {})

    @property
    def matrix_elements(self) -> int:
        """Weights that every token of a dense decoder is multiplied with, the head included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values in bf16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def step_floor(self, requests: int, context: int) -> float:
        """Seconds of a decode step: the larger of weight bytes and FLOP of the products, and the KV cache read once."""
        products = max(self.matrix_elements * 2 / BANDWIDTH, 2 * self.matrix_elements * requests / PRODUCT)
        return products + requests * context * self.cache_bytes_per_token / BANDWIDTH


def _qwen3(**sizes: Any) -> Shape:
    common = {"architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "head_dim": 128, "kv_heads": 8}
    return Shape(vocabulary=151936, positions=40960, theta=1e6, epsilon=1e-6, **(common | sizes))


def _llama3(**sizes: Any) -> Shape:
    return Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        kv_heads=8,
        heads=32,
        vocabulary=128256,
        positions=131072,
        theta=5e5,
        epsilon=1e-5,
        **sizes,
    )


SHAPES = {
    "qwen3-0.6b": _qwen3(hidden=1024, intermediate=3072, layers=28, heads=16, tied=True),
    "llama-3.2-1b": _llama3(hidden=2048, intermediate=8192, layers=16, head_dim=64, tied=True, scaling=LLAMA3_SCALING),
    "qwen3-8b": _qwen3(hidden=4096, intermediate=12288, layers=36, heads=32, tied=False),
    # Qwen3-30B-A3B with 12 of its 48 layers.
    "qwen3-moe": _qwen3(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        hidden=2048,
        intermediate=6144,
        layers=12,
        heads=32,
        kv_heads=4,
        tied=False,
        mixture=Mixture(count=128, each=8, inner=768),
    ),
    "llama-3.1-8b": _llama3(
        hidden=4096, intermediate=14336, layers=32, head_dim=128, tied=False, scaling=LLAMA3_SCALING | {"factor": 8.0}
    ),
}


def model_folder(name: str, root: Path) -> Path:
    """A folder with config.json and a tokenizer that knows a few words, as ours needs one to start."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name].config()))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
