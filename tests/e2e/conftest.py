"""Real servers: the embedded model once for all tests, a tiny random one for each test that ends its server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.plugins import load_plugins
from fourfold.testing.upcycling import upcycle

from .running_server import Server

Start = Callable[..., Server]

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""On a busy machine two threads that wait for each other take many times as long as one."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model at float32, shared by the whole run."""
    server = Server(["--dtype", "float32"], tmp_path_factory.mktemp("run"), **ONE_THREAD)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that starts and steps fast, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    embedded = resolve_checkpoint(ModelConfig(), load_plugins(), NoProgress()).folder
    for file in embedded.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with five experts in place of a feed-forward."""
    folder = tmp_path_factory.mktemp("models") / "tiny-mixture"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def upcycled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a mixture: three experts, of which a token takes two. Nearly a gigabyte."""
    return upcycle(tmp_path_factory.mktemp("upcycled") / "smollm2-moe", num_experts=3)


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers of the tiny model, called ``tiny``; kills what is left of them."""
    servers: list[Server] = []

    def start(
        *arguments: str,
        ready: bool = True,
        model: Path = tiny_model,
        load_format: str = "dummy",
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        common = ["--load-format", load_format, "--dtype", "float32", "--served-model-name", "tiny"]
        given = {**ONE_THREAD, **(environment or {})}
        server = Server([str(model), *common, *arguments], tmp_path / f"run{len(servers)}", **given)
        servers.append(server)
        if ready:
            server.wait_until_ready()
        return server

    yield start
    for server in servers:
        server.kill()
