"""A small checkpoint with weights, and engines on it; a test without a CUDA device is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold.testing.small_shapes import DENSE, MIXTURE, VOCABULARY, write_shape


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
    write_shape(folder, DENSE)
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
def mixture(tmp_path: Path) -> Path:
    """The shape of a mixture, for dummy weights."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    write_shape(folder, MIXTURE)
    return folder
