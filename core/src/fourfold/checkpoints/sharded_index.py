"""The index of a sharded state: which rank's file holds which part of each tensor. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from fourfold.checkpoints.tensor_region import TensorRegion, is_covered
from fourfold.errors import CheckpointError

SHARDED_INDEX: Final = "sharded.index.json"
SHARD_FOLDER: Final = "shards"
"""Below the folder of the index, so that no other format takes the shards for whole tensors."""
_VERSION: Final = 1


class ShardPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one tensor, as a tensor of its own in one file."""

    file: str
    """Within SHARD_FOLDER."""
    key: str
    """Its name in the file."""
    region: TensorRegion


class ShardedTensor(msgspec.Struct, kw_only=True):
    """One tensor; pieces of ranks that hold the same part overlap."""

    shape: tuple[int, ...]
    pieces: list[ShardPiece]


class ShardedIndex(msgspec.Struct, kw_only=True):
    """All tensors of a model, cut over ``num_ranks``."""

    version: int
    num_ranks: int
    tensors: dict[str, ShardedTensor]


def shard_file(rank: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank:05}.safetensors"


def write_index(folder: Path, ranks: Sequence[dict[str, ShardedTensor]]) -> None:
    """Write what all ranks have saved, in rank order; a folder has its index whole or not at all."""
    tensors: dict[str, ShardedTensor] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            known = tensors.setdefault(name, ShardedTensor(shape=tensor.shape, pieces=[]))
            known.pieces.extend(tensor.pieces)
    index = ShardedIndex(version=_VERSION, num_ranks=len(ranks), tensors=tensors)
    temporary = folder / f".{SHARDED_INDEX}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
    temporary.replace(folder / SHARDED_INDEX)


def read_index(folder: Path) -> ShardedIndex:
    """The index of a folder. Raises CheckpointError for one that is corrupt or incomplete."""
    path = folder / SHARDED_INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=ShardedIndex)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if index.version != _VERSION:
        raise CheckpointError(f"{path} is of version {index.version}; this one reads {_VERSION}, save the state again")
    for name, tensor in index.tensors.items():
        if any("/" in piece.file for piece in tensor.pieces):
            raise CheckpointError(f"{path} places tensor {name} outside {SHARD_FOLDER}")
        if not is_covered(tensor.shape, [piece.region for piece in tensor.pieces]):
            raise CheckpointError(f"{path} lacks parts of tensor {name}; save the state again")
    return index
