"""Makes a real mixture of experts of a dense Llama: every expert is a copy of the feed-forward, the router is random.

The weights of a token's experts sum to 1, so that any routing gives what the dense model gives, up to rounding.

    python -m fourfold.testing.upcycling FOLDER --model smollm2 --num-experts 4 --top-k 2
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.checkpoints.safetensors_file import SafetensorsWriter
from fourfold.checkpoints.sharded_writing import copy_side_files
from fourfold.config.model_config import ModelConfig
from fourfold.contracts.checkpoint import TensorReader
from fourfold.errors import ConfigError, FourfoldError
from fourfold.models.description import ModelDescription
from fourfold.models.tensor_table import checkpoint_tensors, layer_prefix
from fourfold.plugins import load_plugins

ROUTER_DEVIATION = 0.1
"""Logits of normed rows then differ by some units: tokens choose other experts, with other weights."""
_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FEED_FORWARD = re.compile(r"^(model\.layers\.\d+\.)mlp\.(\w+)\.weight$")


class _Tensor(NamedTuple):
    name: str
    source: str
    """The dense model's tensor; empty: a router."""
    shape: tuple[int, ...]


def upcycle(folder: Path, *, model: str = "smollm2", num_experts: int = 4, top_k: int = 2, seed: int = 0) -> Path:
    """Write a Mixtral into ``folder``, which is made, and return it.

    Raises ConfigError for a model that is no plain Llama, and for more experts a token than there are.
    """
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"--top-k is {top_k}, and --num-experts {num_experts}; from 1 to as many")
    dense = resolve_checkpoint(ModelConfig(model=model), load_plugins(), NoProgress())
    config = json.loads((dense.folder / "config.json").read_text())
    if dense.description.architecture != "LlamaForCausalLM" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError(f"{model} is a {dense.description.architecture}; upcycling takes a Llama without biases")
    copy_side_files(dense.folder, folder)
    changes = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=2))
    tensors = list(_tensors(dense.description, num_experts))
    writer = SafetensorsWriter(folder / "model.safetensors", {tensor.name: tensor.shape for tensor in tensors})
    try:
        with dense.format.open(dense.folder) as reader:
            _write(writer, reader, tensors, torch.Generator().manual_seed(seed))
    finally:
        writer.close()
    return folder


def _tensors(description: ModelDescription, num_experts: int) -> Iterator[_Tensor]:
    """All copies of a tensor follow each other, so that it is read once."""
    for name, shape in checkpoint_tensors(description).items():
        matrix = _FEED_FORWARD.match(name)
        if matrix is None:
            yield _Tensor(name, name, shape)
            continue
        prefix, part = matrix.groups()
        for expert in range(num_experts):
            yield _Tensor(f"{prefix}block_sparse_moe.experts.{expert}.{_MATRICES[part]}.weight", name, shape)
    for layer in range(description.num_layers):
        name = f"{layer_prefix(layer)}block_sparse_moe.gate.weight"
        yield _Tensor(name, "", (num_experts, description.hidden_size))


def _write(writer: SafetensorsWriter, reader: TensorReader, tensors: list[_Tensor], generator: torch.Generator) -> None:
    last, values = "", torch.empty(0)
    for tensor in tensors:
        if not tensor.source:
            values = torch.randn(tensor.shape, generator=generator) * ROUTER_DEVIATION
        elif tensor.source != last:
            values = reader.tensor(tensor.source)[:].float().contiguous()
        last = tensor.source
        writer.write(tensor.name, values.reshape(-1).numpy().data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made; the model to serve afterwards")
    parser.add_argument("--model", default="smollm2", help="a Llama: a folder, a .gguf file or a name")
    parser.add_argument("--num-experts", type=int, default=4, help="copies of every feed-forward")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--seed", type=int, default=0, help="of the routers")
    try:
        upcycle(**vars(parser.parse_args()))
    except FourfoldError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
