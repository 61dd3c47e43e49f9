"""Reads LoRA adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors. No torch.

What an adapter adds to a linear layer is ``scale * B @ A``, with A [r, in] and B [out, r] (Hu et al. 2021; the scale is
alpha / r, or alpha / sqrt(r) where the adapter says rslora, Kalajdzievski 2023).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fourfold.checkpoints.adapter_targets import named_modules
from fourfold.checkpoints.json_file import read_json
from fourfold.checkpoints.safetensors_file import read_header
from fourfold.errors import CheckpointError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.tensor_table import checkpoint_tensors

if TYPE_CHECKING:
    from fourfold.models.description import ModelDescription

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
_MODULE: Final = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj(?:_with_mqa)?")
_REFUSED: Final[Mapping[str, str]] = {
    "modules_to_save": "whole modules beside the adapter's matrices",
    "use_dora": "DoRA",
    "fan_in_fan_out": "transposed weights",
    "rank_pattern": "ranks that differ from module to module",
    "alpha_pattern": "alphas that differ from module to module",
    "lora_bias": "biases of its own",
    "layer_replication": "replicated layers",
    "target_parameters": "parameters that are no linear layer's",
    "trainable_token_indices": "embeddings of its own",
}
"""Settings that must be absent, false or empty, and what they would mean."""


class Matrices(NamedTuple):
    """The names of one module's tensors in the file."""

    a: str
    b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter that fits a model."""

    file: Path
    """Holds the tensors."""
    scale: float
    modules: dict[str, Matrices]
    """By the module's name in the model's checkpoint, such as ``model.layers.0.mlp.up_proj``."""


def adapter_folder(path: str) -> Path:
    """The absolute folder that ``path`` means. Raises CheckpointError for the home of a user who does not exist."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise CheckpointError(f"{path!r} cannot be looked up: {error}") from error


def read_adapter(folder: Path, description: ModelDescription, *, max_rank: int) -> Adapter:
    """Look at an adapter's config and header. Raises CheckpointError for what is missing, damaged, not supported or of
    another model than the described one, and for a rank above ``max_rank``.
    """
    for name in (CONFIG, WEIGHTS):
        try:
            present = (folder / name).is_file()
        except OSError as error:  # such as a name that is too long
            raise CheckpointError(f"{folder} is no LoRA adapter: {error.strerror}") from error
        if not present:
            raise CheckpointError(f"{folder} is no LoRA adapter: it has no {name}")
    values: Mapping[str, Any] = read_json(folder / CONFIG)
    rank, scale = _read_scale(ConfigReader(values, where=str(folder / CONFIG)), values, max_rank)
    file = folder / WEIGHTS
    shapes = {name: place.shape for name, place in read_header(file).items()}
    modules = _pair(file, shapes)
    whole = checkpoint_tensors(description)
    for module, (a, b) in modules.items():
        weight = whole.get(f"{module}.weight")
        if weight is None or not _MODULE.fullmatch(module):
            raise CheckpointError(
                f"{file} adapts {module}; only the linear layers of attention and feed-forward of "
                f"{description.architecture} can be adapted"
            )
        for name, wanted in ((a, (rank, weight[1])), (b, (weight[0], rank))):
            if shapes[name] != wanted:
                raise CheckpointError(
                    f"{file} has tensor {name} of shape {list(shapes[name])}; for this model and rank {rank} it is "
                    f"{list(wanted)}"
                )
    _check_targets(folder, values, modules, whole)
    return Adapter(file=file, scale=scale, modules=modules)


def _check_targets(folder: Path, values: Mapping[str, Any], adapted: Collection[str], whole: Collection[str]) -> None:
    """The file must hold what the config says, no more and no less: else one of them belongs to another adapter."""
    if values.get("target_modules") is None:
        return
    modules = [name.removesuffix(".weight") for name in whole]
    where = str(folder / CONFIG)
    named = named_modules(values, [module for module in modules if _MODULE.fullmatch(module)], where=where)
    for module in adapted:
        if module not in named:
            raise CheckpointError(f"{folder / WEIGHTS} adapts {module}, and {where} has it not among target_modules")
    for module in sorted(named.difference(adapted)):
        raise CheckpointError(f"{where} has {module} among target_modules, and {folder / WEIGHTS} has no matrix of it")


def _read_scale(config: ConfigReader, values: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{config.where} has peft_type {kind!r}; only LORA is supported")
    bias = config.text("bias", "none")
    if bias != "none":
        raise CheckpointError(f"{config.where} has bias {bias!r}; only none is supported")
    for key, meaning in _REFUSED.items():
        if values.get(key):
            raise CheckpointError(f"{config.where} has {key}: {values[key]!r:.100}; {meaning} are not supported")
    rank = config.integer("r")
    if rank > max_rank:
        raise CheckpointError(f"{config.where} has r: {rank}; {max_rank} at most, see --max-lora-rank")
    alpha = config.number("lora_alpha", float(rank))
    return rank, alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _pair(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrices]:
    found: dict[str, dict[str, str]] = {}
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{file} holds tensor {name}, which is no matrix A or B of a linear layer")
        matrices = found.setdefault(match["module"], {})
        if other := matrices.get(match["matrix"]):
            raise CheckpointError(f"{file} has matrix {match['matrix']} of {match['module']} twice: {other} and {name}")
        matrices[match["matrix"]] = name
    for module, matrices in found.items():
        if len(matrices) != 2:
            raise CheckpointError(f"{file} has only matrix {'/'.join(matrices)} of {module}; A and B belong together")
    if not found:
        raise CheckpointError(f"{file} holds no tensor")
    return {module: Matrices(matrices["A"], matrices["B"]) for module, matrices in found.items()}
