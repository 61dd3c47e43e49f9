"""A small checkpoint with weights, and engines on it; a test without a CUDA device is skipped."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 2048
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, large enough that greedy texts do not repeat, and logits of a usual size."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    hidden, width, heads, kv_heads, dim = 256, 512, 8, 2, 64
    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden) * 16,
        "model.norm.weight": torch.ones(hidden) / 8,
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": random(heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": random(kv_heads * dim, hidden),
            f"{prefix}self_attn.v_proj.weight": random(kv_heads * dim, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, heads * dim) * 4,
            f"{prefix}self_attn.q_norm.weight": torch.rand(dim, generator=generator) + 0.5,
            f"{prefix}self_attn.k_norm.weight": torch.rand(dim, generator=generator) + 0.5,
            f"{prefix}mlp.gate_proj.weight": random(width, hidden),
            f"{prefix}mlp.up_proj.weight": random(width, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, width) * 4,
            f"{prefix}input_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
            f"{prefix}post_attention_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def opened(checkpoint: Path) -> Callable[..., AbstractContextManager[Any]]:
    """An LLM on the device that takes little of it, closed at the end of its block."""

    @contextmanager
    def build(**options: Any) -> Iterator[Any]:
        import torch

        from fourfold import LLM

        settings = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_memory": 64 << 20,
        }
        try:
            with LLM(str(checkpoint), **(settings | options)) as llm:
                yield llm
        finally:
            torch.cuda.empty_cache()

    return build


@pytest.fixture
def mixture(checkpoint: Path, tmp_path: Path) -> Path:
    """The shape of a mixture, for dummy weights."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(checkpoint / name, folder)
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = {**CONFIG, **experts, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
