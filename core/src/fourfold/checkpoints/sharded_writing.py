"""Writes one rank's part of a sharded state: the slices that it took of the checkpoint, bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fourfold.checkpoints.safetensors_file import SafetensorsWriter
from fourfold.checkpoints.sharded_index import SHARD_FOLDER, ShardedTensor, ShardPiece, shard_file
from fourfold.checkpoints.tensor_region import TensorRegion
from fourfold.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.checkpoint import TensorReader

_SIDE_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model")
"""What a model has beside its weights: config.json, the tokenizer, the chat template."""


def copy_side_files(source: Path, target: Path) -> None:
    """Make ``target`` with everything of ``source`` but weights. Raises ConfigError for a folder that is in use."""
    if target.exists() and any(path.name != SHARD_FOLDER for path in target.iterdir()):
        raise ConfigError(f"{target} is not empty; name a new folder")
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _SIDE_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)


def write_shard(
    folder: Path, rank: int, reader: TensorReader, regions: Mapping[str, Sequence[TensorRegion]]
) -> dict[str, ShardedTensor]:
    """Write the regions of every tensor into the rank's file; what is where, for the index."""
    file = shard_file(rank)
    index = {
        name: ShardedTensor(
            shape=tuple(reader.tensor(name).shape),
            pieces=[
                ShardPiece(file=file, key=f"{name}#{number}", region=region) for number, region in enumerate(parts)
            ],
        )
        for name, parts in regions.items()
        if parts
    }
    pieces = [(name, piece) for name, tensor in index.items() for piece in tensor.pieces]
    (folder / SHARD_FOLDER).mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(
        folder / SHARD_FOLDER / file,
        {piece.key: piece.region.shape for _, piece in pieces},
        dtypes={piece.key: _dtype(reader, name) for name, piece in pieces},
    )
    try:
        for name, piece in pieces:
            writer.write(piece.key, _bytes(reader.tensor(name)[_index(piece.region)]))
    finally:
        writer.close()
    return index


def _dtype(reader: TensorReader, name: str) -> torch.dtype:
    return reader.tensor(name)[:0].dtype


def _index(region: TensorRegion) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in zip(region.start, region.stop))


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
