from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import describe_config
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError
from fourfold.models.dummy_format import DummyFormat, DummyTensor
from fourfold.plugins import PluginRegistry

CONFIG = {
    "architectures": ["GemmaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture
def context(tmp_path: Path, registry: PluginRegistry) -> CheckpointContext:
    return CheckpointContext(
        cache_folder=str(tmp_path / "cache"), describe=lambda values: describe_config(registry, values)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def read(context: CheckpointContext, folder: Path) -> dict[str, torch.Tensor]:
    with DummyFormat(context).open(folder) as reader:
        return {name: reader.tensor(name)[:] for name in reader.names()}


def test_shape_follows_config(context: CheckpointContext, folder: Path) -> None:
    assert not DummyFormat(context).recognizes(folder), "random weights must be asked for"
    assert DummyFormat(context).prepare(folder, progress=NoProgress()) == folder
    tensors = read(context, folder)
    assert tensors["model.embed_tokens.weight"].shape == (50, 16)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (16, 16)
    assert "lm_head.weight" not in tensors
    # This family adds 1 to its norm weights, so that they lie around 0.
    assert tensors["model.norm.weight"].abs().max() < 0.2


def test_equal_seeds_give_equal_weights(context: CheckpointContext, folder: Path) -> None:
    first, second = read(context, folder), read(context, folder)
    other = read(replace(context, seed=1), folder)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert not torch.equal(tensor, other[name])
    names = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    assert not torch.equal(first[names[0]], first[names[1]])


@pytest.mark.parametrize("index", [slice(0, 10), slice(299, 302), slice(130, 700), slice(700, 700), slice(0, 1000)])
@pytest.mark.parametrize("columns", [None, slice(3, 1500)])
def test_slices_equal_slices_of_the_whole(index: slice, columns: slice | None) -> None:
    tensor = DummyTensor((700, 2000), "x", 0.0)  # several blocks of rows
    whole = tensor[:]
    assert whole.shape == (700, 2000)
    assert whole.std() == pytest.approx(0.02, rel=0.01)
    at: Any = index if columns is None else (index, columns)
    assert torch.equal(tensor[at], whole[at])


def test_vectors() -> None:
    tensor = DummyTensor((600_000,), "v", 1.0)
    whole = tensor[:]
    assert whole.mean() == pytest.approx(1.0, abs=1e-3)
    assert torch.equal(tensor[262_000:262_300], whole[262_000:262_300])


def test_needs_a_config(context: CheckpointContext, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json, which --load-format dummy takes the shape from"):
        DummyFormat(context).read_config(tmp_path)
