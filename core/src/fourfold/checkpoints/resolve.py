"""From a model's name to a prepared folder and a description, through installed sources and formats. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.blame import blame
from fourfold.checkpoints.conversion_cache import default_cache_folder
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.config.model_config import ModelConfig
    from fourfold.contracts.checkpoint import CheckpointFormat, CheckpointSource
    from fourfold.entries import CheckpointFormatEntry, CheckpointSourceEntry
    from fourfold.models.description import ModelDescription
    from fourfold.plugins import PluginRegistry

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model that is ready to be loaded."""

    folder: Path
    """With config.json, tokenizer.json and tensors."""
    description: ModelDescription
    format: CheckpointFormat
    """Opens ``folder``."""


def describe_checkpoint(config: ModelConfig, registry: PluginRegistry, progress: Progress) -> ModelDescription:
    """What ``config.model`` is, from its header alone: no conversion, no download of weights.

    Raises CheckpointError for a model that cannot be found or read, ConfigError for one that is not supported and for
    a ``--max-model-len`` beyond it.
    """
    context = _context(config, registry)
    path = _locate(config, registry, context, progress, config_only=True)
    if config.load_format == AUTO and (path / "config.json").is_file():
        return _describe(config, context.describe, _read_config(path))
    return _describe(config, context.describe, _format(config, registry, context, path).read_config(path))


def resolve_checkpoint(
    config: ModelConfig, registry: PluginRegistry, progress: Progress, *, device: torch.device | None = None
) -> Checkpoint:
    """``config.model`` on this host, downloaded and converted if need be; the errors are ``describe_checkpoint``'s.

    ``device`` is where tensors that no file holds are made.
    """
    context = _context(config, registry, device)
    path = _locate(config, registry, context, progress, config_only=False)
    chosen = _format(config, registry, context, path)
    description = _describe(config, context.describe, chosen.read_config(path))
    return Checkpoint(folder=chosen.prepare(path, progress=progress), description=description, format=chosen)


def _read_config(path: Path) -> Mapping[str, Any]:
    from fourfold.checkpoints.json_file import read_json

    return read_json(path / "config.json")


def _context(config: ModelConfig, registry: PluginRegistry, device: torch.device | None = None) -> CheckpointContext:
    return CheckpointContext(
        cache_folder=default_cache_folder(),
        describe=partial(describe_config, registry),
        seed=config.effective_seed,
        device=device,
    )


def describe_config(registry: PluginRegistry, values: Mapping[str, Any]) -> ModelDescription:
    """The description of a config.json, by the installed model that reads its architecture."""
    readers = {name: entry for entry in registry.models().values() for name in entry.architectures}
    named = values.get("architectures")
    if not isinstance(named, list) or not named:
        raise ConfigError(f"config.json names no architectures; supported: {', '.join(sorted(readers))}")
    architecture = str(named[0])
    if architecture not in readers:
        close = difflib.get_close_matches(architecture, readers, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"architecture {architecture!r} is not supported{hint}; supported: {', '.join(sorted(readers))}"
        )
    description: ModelDescription = readers[architecture].build(values)
    return description


def _describe(
    config: ModelConfig, describe: Callable[[Mapping[str, Any]], ModelDescription], values: Mapping[str, Any]
) -> ModelDescription:
    description = describe(values)
    if config.max_model_len is not None and config.max_model_len > description.max_position:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, but {config.model} was made for {description.max_position} "
            "tokens; choose that or less"
        )
    return description


def _locate(
    config: ModelConfig, registry: PluginRegistry, context: CheckpointContext, progress: Progress, *, config_only: bool
) -> Path:
    entries = sorted(registry.checkpoint_sources().values(), key=lambda entry: (entry.order, entry.name))
    sources = []
    for entry in entries:
        with blame(f"checkpoint source {entry.name!r}"):
            sources.append(entry.build(context))
    for entry, source in zip(entries, sources, strict=True):
        with blame(f"checkpoint source {entry.name!r}"):
            path = source.locate(config.model, revision=config.revision, progress=progress, config_only=config_only)
        if path is not None:
            return path
    raise CheckpointError(_unknown_model(config.model, entries, sources))


def _unknown_model(model: str, entries: list[CheckpointSourceEntry], sources: list[CheckpointSource]) -> str:
    known = [name for source in sources for name in source.names()]
    close = difflib.get_close_matches(model, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    expected = "".join(f"\n  {entry.name}: {entry.summary}" for entry in entries)
    return f"no model called {model!r}{hint}\nmodels come from{expected}"


def _format(config: ModelConfig, registry: PluginRegistry, context: CheckpointContext, path: Path) -> CheckpointFormat:
    entries: Mapping[str, CheckpointFormatEntry] = registry.checkpoint_formats()
    if config.load_format != AUTO:
        if config.load_format not in entries:
            close = difflib.get_close_matches(config.load_format, entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"no load format called {config.load_format!r}{hint}; there are {', '.join(entries)}")
        with blame(f"checkpoint format {config.load_format!r}"):
            return entries[config.load_format].build(context)
    for entry in entries.values():
        with blame(f"checkpoint format {entry.name!r}"):
            chosen = entry.build(context)
            if chosen.recognizes(path):
                return chosen
    raise CheckpointError(_unrecognized(path, entries))


def _unrecognized(path: Path, entries: Mapping[str, CheckpointFormatEntry]) -> str:
    formats = "; ".join(f"{entry.name}: {entry.summary}" for entry in entries.values())
    if path.is_dir() and any(path.glob("*.bin")):
        return f"{path} holds pickled weights (*.bin), which are not read; convert them to safetensors"
    if path.is_dir() and any(path.glob("*.gguf")):
        return f"{path} holds several .gguf files; name one of them"
    if path.suffix == ".safetensors" and path.is_file():
        return f"{path} is a file of weights alone; name the folder that holds it and config.json"
    if (path / "config.json").is_file():
        return f"{path} has a config.json and no weights beside it; fetch or convert them, or use --load-format dummy"
    if path.is_dir() and any(path.glob("*.safetensors")):
        return f"{path} has weights and no config.json; fetch the model's config.json too"
    return f"{path} is of no format that is read; formats: {formats}"
