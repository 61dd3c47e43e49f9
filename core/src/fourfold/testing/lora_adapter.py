"""A random LoRA adapter as PEFT writes it, and the model with it merged: what an engine with the adapter must equal.

Also a way to try adapters without training one: ``python -m fourfold.testing.lora_adapter FOLDER --model smollm2``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.checkpoints.safetensors_file import SafetensorsWriter
from fourfold.config.model_config import ModelConfig
from fourfold.errors import FourfoldError
from fourfold.models.adapter_file import CONFIG, WEIGHTS
from fourfold.plugins import load_plugins

if TYPE_CHECKING:
    from fourfold.checkpoints.resolve import Checkpoint

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Collection[str] = ALL_MODULES,
    rslora: bool = False,
    seed: int = 0,
    merged: Path | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of some modules into a new folder, and the model with it merged into ``merged``.

    ``settings`` go into its config. Returns the folder.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    with checkpoint.format.open(checkpoint.folder) as reader:
        for name in reader.names():
            weights[name] = reader.tensor(name)[:].float()
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in modules:
                continue
            out, into = weights[name].shape
            # So large that a part which is lost or misplaced shows in what is generated.
            a = torch.randn(rank, into, generator=generator) / math.sqrt(into)
            b = torch.randn(out, rank, generator=generator) * weights[name].std() * math.sqrt(into)
            matrices[f"base_model.model.{module}.lora_A.weight"] = a
            matrices[f"base_model.model.{module}.lora_B.weight"] = b
            weights[name] = weights[name] + scale * (b @ a)
    folder.mkdir(parents=True)
    _write(folder / WEIGHTS, matrices)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps({**config, "target_modules": sorted(modules), **settings}))
    if merged is not None:
        merged.mkdir(parents=True)
        for file in checkpoint.folder.iterdir():
            if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name:
                shutil.copy(file, merged)
        _write(merged / "model.safetensors", weights)
    return folder


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = SafetensorsWriter(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor.contiguous().numpy().data)
    writer.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made; the adapter to load afterwards")
    parser.add_argument("--model", default="smollm2", help="a folder, a .gguf file or a name")
    parser.add_argument("--rank", type=int, default=4, help="r of the adapter")
    parser.add_argument("--seed", type=int, default=0, help="of its numbers")
    options = parser.parse_args()
    if options.rank < 1:
        parser.error(f"--rank is {options.rank}; 1 or more")
    if options.folder.exists():
        parser.error(f"{options.folder} is already there; name a new folder")
    try:
        checkpoint = resolve_checkpoint(ModelConfig(model=options.model), load_plugins(), NoProgress())
    except FourfoldError as error:
        parser.error(str(error))
    # Far less than what tests use: the answers differ from the model's, and are still text.
    write_adapter(checkpoint, options.folder, rank=options.rank, alpha=0.05 * options.rank, seed=options.seed)


if __name__ == "__main__":
    main()
