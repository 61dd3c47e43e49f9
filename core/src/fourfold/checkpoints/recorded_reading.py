"""A checkpoint format around another one that notes which parts of each tensor a rank takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.tensor_region import TensorRegion, region_of

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.contracts.checkpoint import CheckpointFormat, TensorReader
    from fourfold.contracts.parallel_layer import TensorSlices


class RecordedFormat:
    """See ``fourfold.contracts.checkpoint.CheckpointFormat``; what is read through ``open`` is noted in ``regions``."""

    def __init__(self, inner: CheckpointFormat) -> None:
        self._inner = inner
        self.regions: dict[str, list[TensorRegion]] = {}
        """Tensor name -> the parts that were taken, each once. A tensor that is asked for again is not noted again."""

    def recognizes(self, path: Path) -> bool:
        """See CheckpointFormat."""
        return self._inner.recognizes(path)

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """See CheckpointFormat."""
        return self._inner.read_config(path)

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """See CheckpointFormat."""
        return self._inner.prepare(path, progress=progress)

    @contextmanager
    def open(self, folder: Path) -> Iterator[TensorReader]:
        """See CheckpointFormat."""
        with self._inner.open(folder) as reader:
            yield _RecordedReader(reader, self.regions)


class _RecordedReader:
    def __init__(self, inner: TensorReader, regions: dict[str, list[TensorRegion]]) -> None:
        self._inner = inner
        self._regions = regions

    def names(self) -> Iterable[str]:
        """See TensorReader."""
        return self._inner.names()

    def tensor(self, name: str) -> TensorSlices:
        """See TensorReader."""
        tensor = self._inner.tensor(name)
        if name in self._regions:
            return tensor
        self._regions[name] = []
        return _RecordedTensor(tensor, self._regions[name])


class _RecordedTensor:
    def __init__(self, inner: TensorSlices, regions: list[TensorRegion]) -> None:
        self._inner = inner
        self._regions = regions

    @property
    def shape(self) -> Sequence[int]:
        """See TensorSlices."""
        return self._inner.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        region = region_of(index, self.shape)
        if region not in self._regions and not region.is_empty:
            self._regions.append(region)
        return self._inner[index]
