from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fourfold import builtin_plugin
from fourfold.entries import CheckpointContext
from fourfold.plugins import PluginRegistry, load_plugins

TOKENS = ["<unk>", "<|start|>", "<|end|>", "<tool>", "a", "b", "ab", "\u0120", "\u0120a", *"0123456789"]
"""Byte-level: \u0120 is a space."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fourfold" / "models"


@pytest.fixture
def registry() -> PluginRegistry:
    return load_plugins(entry_points=False, extra={"core": builtin_plugin})


@pytest.fixture
def context(cache: Path, registry: PluginRegistry) -> CheckpointContext:
    from fourfold.checkpoints.resolve import describe_config

    return CheckpointContext(cache_folder=str(cache), describe=lambda values: describe_config(registry, values))


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 4, *[1] * (len(TOKENS) - 4)])
    writer.add_token_merges(["a b", "\u0120 a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file: ``tensors`` name -> values or (values, quantisation); ``keys`` adds or replaces metadata."""

    def write(
        tensors: dict[str, Any],
        *,
        architecture: str = "llama",
        name: str = "model.gguf",
        tokenizer: Callable[[gguf.GGUFWriter], None] | None = add_tokenizer,
        keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
        **sizes: int,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        shape = {"layers": 1, "hidden": 32, "inner": 64, "heads": 4, "kv_heads": 2, "context": 128, **sizes}
        writer.add_block_count(shape["layers"])
        writer.add_embedding_length(shape["hidden"])
        writer.add_feed_forward_length(shape["inner"])
        writer.add_head_count(shape["heads"])
        writer.add_head_count_kv(shape["kv_heads"])
        writer.add_context_length(shape["context"])
        writer.add_layer_norm_rms_eps(1e-5)
        keys(writer)
        if tokenizer is not None:
            tokenizer(writer)
        for tensor, given in tensors.items():
            values, kind = given if isinstance(given, tuple) else (given, gguf.GGMLQuantizationType.F32)
            data = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
            writer.add_tensor(tensor, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tiny_tensors() -> dict[str, Any]:
    """A whole model of one layer, tied."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(TOKENS), 32),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
        "output_norm.weight": (32,),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
