"""The format ``safetensors``: a folder with config.json and one or several .safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.block_scales import SCALE_SUFFIX, BlockScaledReader, read_block_size
from fourfold.checkpoints.json_file import read_json
from fourfold.checkpoints.safetensors_file import MappedFile
from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.entries import CheckpointContext

INDEX = "model.safetensors.index.json"


class SafetensorsFormat:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        """Takes nothing from the context: such a folder needs no conversion."""

    def recognizes(self, path: Path) -> bool:
        """A folder with config.json and tensors."""
        return (path / "config.json").is_file() and bool((path / INDEX).is_file() or any(path.glob("*.safetensors")))

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """config.json; a look at what a model is may come before its weights do."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file; name the folder that holds config.json and the weights")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json; name a folder with config.json and *.safetensors")
        return read_json(path / "config.json")

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """The folder itself, unless its weights are missing."""
        if not self.recognizes(path):
            raise CheckpointError(f"{path} has a config.json and no *.safetensors; fetch or convert the weights")
        return path

    @contextmanager
    def open(self, folder: Path) -> Iterator[TensorReader]:
        """Map every file that the index names, or all of the folder's."""
        config = folder / "config.json"
        block = read_block_size(read_json(config)) if config.is_file() else None
        reader = _FolderReader(_files_of(folder))
        try:
            reader.check_scaled(by_block=block is not None)
            yield reader if block is None else BlockScaledReader(reader, block)
        finally:
            reader.close()


def _files_of(folder: Path) -> dict[Path, set[str] | None]:
    """File -> the tensors that the index places in it; None: whatever it holds."""
    index = folder / INDEX
    if not index.is_file():
        # Some repositories hold the same weights a second time, in the publisher's own layout.
        files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
        if not files:
            raise CheckpointError(f"{folder} has no .safetensors file")
        return dict.fromkeys(files)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    placed: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        path = folder / str(file)
        if path.parent != folder:
            raise CheckpointError(f"{index} places tensor {name} in {file!r}; a file of the same folder")
        if not path.is_file():
            raise CheckpointError(f"{index} places tensor {name} in {path.name}, which is missing; download it")
        placed[path] = (placed.get(path) or set()) | {name}
    return placed


class _FolderReader:
    """The tensors of several mapped files as one."""

    def __init__(self, files: Mapping[Path, set[str] | None]) -> None:
        self._files: list[MappedFile] = []
        self._owners: dict[str, MappedFile] = {}
        self._last: str | None = None
        for path, indexed in files.items():
            file = MappedFile(path)
            self._files.append(file)
            for name in sorted(indexed) if indexed is not None else file.places:
                if name not in file.places:
                    raise CheckpointError(f"{path} lacks tensor {name}, which {INDEX} places there")
                if name in self._owners:
                    raise CheckpointError(f"tensor {name} is in {self._owners[name].path} and again in {path}")
                self._owners[name] = file

    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._owners.keys()

    def check_scaled(self, *, by_block: bool) -> None:
        """Raise CheckpointError for a tensor in fp8 that has no scales, or scales of a kind that is not known."""
        for name, file in self._owners.items():
            if file.places[name].dtype == "F8_E4M3" and not (by_block and name + SCALE_SUFFIX in self._owners):
                raise CheckpointError(
                    f"{file.path} has tensor {name} in F8_E4M3 without the scales of its blocks; config.json's "
                    f"quantization_config says how large those are, and {name}{SCALE_SUFFIX} holds them"
                )

    def tensor(self, name: str) -> MappedTensor:
        """A tensor that is read where it is indexed; the pages of the one before are given back."""
        if name not in self._owners:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        if self._last is not None:
            self._owners[self._last].drop_pages(self._last)
        self._last = name
        return MappedTensor(self._owners[name], name)

    def close(self) -> None:
        """Unmap all files."""
        for file in self._files:
            file.close()


class MappedTensor:
    """One tensor of a mapped file."""

    def __init__(self, file: MappedFile, name: str) -> None:
        self._file = file
        self._name = name

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        return self._file.places[self._name].shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        return self._file.view(self._name)[index]
