"""Adapters that fit, and each thing that can be wrong with one, in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.checkpoints.json_file import MAX_BYTES
from fourfold.errors import CheckpointError, ConfigError
from fourfold.models.adapter_file import adapter_folder, read_adapter
from fourfold.models.description import LayerDescription, ModelDescription, RotaryDescription

MODEL = ModelDescription(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(LayerDescription(), LayerDescription()),
    rotaries=(RotaryDescription(theta=1e4, dim=4),),
    max_model_len=64,
    max_position=64,
    norm_epsilon=1e-5,
    attention_scale=0.5,
)
UP, KEY = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj"
TENSORS = {
    f"base_model.model.{UP}.lora_A.weight": torch.ones(4, 8),
    f"base_model.model.{UP}.lora_B.weight": torch.ones(24, 4),
    f"base_model.model.{KEY}.lora_A.default.weight": torch.ones(4, 8),
    f"base_model.model.{KEY}.lora_B.default.weight": torch.ones(4, 4),
}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    save_file(TENSORS if tensors is None else tensors, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "modules_to_save": None, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps({**known, **config}))
    return folder


def test_it_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path), MODEL, max_rank=4)
    assert adapter.scale == 1.5
    assert adapter.modules.keys() == {UP, KEY}
    assert adapter.modules[KEY].a == f"base_model.model.{KEY}.lora_A.default.weight"
    assert read_adapter(write(tmp_path, use_rslora=True), MODEL, max_rank=4).scale == pytest.approx(6 / math.sqrt(4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type 'IA3'; only LORA"),
        ({"lora_alpha": 10**400}, r"lora_alpha: 1000+; a number"),
        ({"bias": "all"}, r"bias 'all'; only none"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]; whole modules .* are not supported"),
        ({"use_dora": True}, r"use_dora: True; DoRA"),
        ({"rank_pattern": {"x": 2}}, r"rank_pattern"),
        ({"r": 5}, r"r: 5; 4 at most, see --max-lora-rank"),
        ({"r": 0}, r"r: 0; a whole number above 0"),
        ({"r": 2}, r"shape \[4, 8\]; for this model and rank 2 it is \[2, 8\]"),
    ],
)
def test_what_it_says_of_itself_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapter(write(tmp_path, **config), MODEL, max_rank=4)


@pytest.mark.parametrize(
    "config",
    [
        {
            "target_modules": ["up_proj", "k_proj"],
            "layers_to_transform": None,
            "exclude_modules": r".*(0\.mlp|1\.self).*",
        },
        {"target_modules": [UP, "layers.0.self_attn.k_proj"]},
        {"target_modules": r".*\.(1\.mlp\.up|0\.self_attn\.k)_proj", "layers_to_transform": [7]},
        {"target_modules": None},
    ],
)
def test_tensors_are_those_of_the_target_modules(tmp_path: Path, config: dict[str, Any]) -> None:
    assert read_adapter(write(tmp_path, **config), MODEL, max_rank=4).modules.keys() == {UP, KEY}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["up_proj"]}, rf"adapts {KEY}, and .* has it not among target_modules"),
        ({"target_modules": []}, r"has it not among target_modules"),
        ({"target_modules": ["j_proj"]}, r"has it not among target_modules"),
        ({"target_modules": ["up_proj", "k_proj"]}, r"has model\.layers\.0\.mlp\.up_proj among target_modules"),
        ({"target_modules": ["up_proj", "k_proj"], "layers_to_transform": 1}, rf"adapts {KEY}, and"),
        ({"target_modules": [UP, KEY, "lm_head", "q_proj"]}, r"self_attn\.q_proj .* has no matrix of it"),
        ({"target_modules": "all-linear"}, r"has no matrix of it"),
        ({"target_modules": "("}, r"target_modules: '\(', which is no pattern"),
        ({"target_modules": {"up_proj": 1}}, r"target_modules: .*; a list of names, or a pattern"),
        ({"target_modules": [1]}, r"target_modules: \[1\]; a list of names"),
        ({"target_modules": ["up_proj"], "layers_to_transform": ["1"]}, r"layers_to_transform: .* layer numbers"),
    ],
)
def test_tensors_that_contradict_the_target_modules_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path, **config), MODEL, max_rank=4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 8), "adapts lm_head; only the linear layers"),
        ("base_model.model.model.layers.2.mlp.up_proj.lora_A.weight", (4, 8), r"adapts model\.layers\.2\.mlp\.up_proj"),
        (f"base_model.model.{UP}.lora_magnitude_vector.weight", (24,), "is no matrix A or B"),
        (f"base_model.model.{KEY}.lora_B.default.weight", (8, 4), r"shape \[8, 4\]; .* it is \[4, 4\]"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = {**TENSORS, name: torch.ones(shape)}
    if "lora_A" in name:
        tensors[name.replace("lora_A", "lora_B")] = torch.ones(24, 4)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path, tensors), MODEL, max_rank=4)


def test_a_matrix_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = {**TENSORS, f"base_model.model.{UP}.lora_A.default.weight": torch.zeros(4, 8)}
    with pytest.raises(CheckpointError, match=f"matrix A of {UP} twice"):
        read_adapter(write(tmp_path, twice), MODEL, max_rank=4)


def test_paths_that_cannot_be_looked_up_are_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        adapter_folder("~nobody-of-this-name/adapter")
    with pytest.raises(CheckpointError, match="no LoRA adapter: File name too long"):
        read_adapter(Path("a" * 5000), MODEL, max_rank=4)


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "adapter_config.json").open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"has {MAX_BYTES + 1} bytes"):
        read_adapter(tmp_path, MODEL, max_rank=4)


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no LoRA adapter: it has no adapter_config\.json"):
        read_adapter(tmp_path, MODEL, max_rank=4)
    folder = write(tmp_path, {name: tensor for name, tensor in TENSORS.items() if "lora_B.w" not in name})
    with pytest.raises(CheckpointError, match=rf"only matrix A of {UP}"):
        read_adapter(folder, MODEL, max_rank=4)
    file = write(tmp_path) / "adapter_model.safetensors"
    assert load_file(file).keys() == TENSORS.keys()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="adapter_model"):
        read_adapter(tmp_path, MODEL, max_rank=4)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"it has no adapter_model\.safetensors"):
        read_adapter(tmp_path, MODEL, max_rank=4)
