"""The format ``sharded``: what each rank held, written by ``save_sharded_state``; any cut may read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.json_file import read_json
from fourfold.checkpoints.safetensors_file import MappedFile
from fourfold.checkpoints.sharded_index import SHARD_FOLDER, SHARDED_INDEX, ShardedTensor, ShardPiece, read_index
from fourfold.checkpoints.tensor_region import region_of
from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.entries import CheckpointContext


class ShardedFormat:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        """Takes nothing from the context: such a folder needs no conversion."""

    def recognizes(self, path: Path) -> bool:
        """A folder with the index that is written last."""
        return (path / SHARDED_INDEX).is_file()

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """config.json."""
        return read_json(path / "config.json")

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """The folder itself."""
        return path

    @contextmanager
    def open(self, folder: Path) -> Iterator[TensorReader]:
        """Map the files of all ranks."""
        reader = _ShardReader(folder)
        try:
            yield reader
        finally:
            reader.close()


class _ShardReader:
    """Whole tensors of pieces in several mapped files."""

    def __init__(self, folder: Path) -> None:
        self._tensors = read_index(folder).tensors
        self._files: dict[str, MappedFile] = {}
        self._last: ShardedTensor | None = None
        for name, tensor in self._tensors.items():
            for piece in tensor.pieces:
                if piece.file not in self._files:
                    self._files[piece.file] = MappedFile(folder / SHARD_FOLDER / piece.file)
                place = self._files[piece.file].places.get(piece.key)
                if place is None or place.shape != piece.region.shape:
                    raise CheckpointError(f"{piece.file} of {folder} does not hold the part of {name} that it should")

    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def tensor(self, name: str) -> ShardedSlices:
        """A tensor that is read where it is indexed; the pages of the one before are given back."""
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        if self._last is not None:
            for piece in self._last.pieces:
                self._files[piece.file].drop_pages(piece.key)
        self._last = self._tensors[name]
        return ShardedSlices(self._last, self._files)

    def close(self) -> None:
        """Unmap all files."""
        for file in self._files.values():
            file.close()


class ShardedSlices:
    """One tensor, put together where a slice is in several pieces."""

    def __init__(self, tensor: ShardedTensor, files: Mapping[str, MappedFile]) -> None:
        self._tensor = tensor
        self._files = files

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        return self._tensor.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        wanted = region_of(index, self.shape)
        pieces = self._tensor.pieces
        whole = next((piece for piece in pieces if piece.region.contains(wanted)), None)
        if whole is not None:
            return self._view(whole)[wanted.within(whole.region)]
        out = self._view(pieces[0]).new_empty(wanted.shape)
        for piece in pieces:
            shared = piece.region.intersection(wanted)
            if not shared.is_empty:
                out[shared.within(wanted)] = self._view(piece)[shared.within(piece.region)]
        return out

    def _view(self, piece: ShardPiece) -> torch.Tensor:
        return self._files[piece.file].view(piece.key)
