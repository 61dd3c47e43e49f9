"""The format ``dummy``: seeded random weights in the shape of a config.json, equal for every cut. For benchmarks.

They are made where they are used: a kind of device has its own generator, and so its own values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.json_file import read_json
from fourfold.errors import CheckpointError
from fourfold.models.tensor_table import checkpoint_tensors

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.entries import CheckpointContext

_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements that one seed makes: enough to make a generator cheap, few enough that a slice makes little in vain."""
_DEVIATION = 0.02


class DummyFormat:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        self._context = context

    def recognizes(self, path: Path) -> bool:
        """Never by itself: random weights must be asked for."""
        return False

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """config.json."""
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} has no config.json, which --load-format dummy takes the shape from; name a folder with one"
            )
        return read_json(path / "config.json")

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """The folder itself."""
        return path

    @contextmanager
    def open(self, folder: Path) -> Iterator[TensorReader]:
        """Nothing is read but the shape."""
        description = self._context.describe(self.read_config(folder))
        yield _DummyReader(
            checkpoint_tensors(description), self._context.seed, description.norm_offset, self._context.device
        )


class _DummyReader:
    """Makes tensors when they are indexed."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, norm_offset: float, device: torch.device | None
    ) -> None:
        self._device = device
        self._shapes = shapes
        self._seed = seed
        self._norm = 1.0 - norm_offset

    def names(self) -> Iterable[str]:
        """Every tensor of the shape."""
        return self._shapes.keys()

    def tensor(self, name: str) -> DummyTensor:
        """A tensor that is made where it is indexed."""
        if name not in self._shapes:
            raise CheckpointError(f"the model has no tensor {name}")
        # Norms around 1, so that activations keep their size through any number of layers.
        centre = self._norm if name.endswith("norm.weight") else 0.0
        return DummyTensor(self._shapes[name], f"{self._seed}/{name}", centre, self._device)


class DummyTensor:
    """Normal random values; an element depends on seed, name and its own place alone."""

    def __init__(self, shape: tuple[int, ...], key: str, centre: float, device: torch.device | None = None) -> None:
        self._shape = shape
        self._device = device
        self._key = key
        self._centre = centre
        self._row = math.prod(shape[1:])
        elements = _BLOCK_ELEMENTS["cpu" if device is None else device.type]
        self._rows_per_block = max(1, elements // max(1, self._row))

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        return self._shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        import torch

        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self._shape[0])
        widths = [len(range(*part.indices(self._shape[1 + dim]))) for dim, part in enumerate(columns)]
        shape = (max(0, stop - start), *widths, *self._shape[1 + len(widths) :])
        values = torch.empty(shape, device=self._device)
        step = self._rows_per_block
        for first in range(start // step * step, stop, step):
            low, high = max(start, first), min(stop, first + step)
            made = self._block(first // step)[(slice(low - first, high - first), *columns)]
            values[low - start : high - start] = made
        return values

    def _block(self, block: int) -> torch.Tensor:
        import torch

        digest = hashlib.sha256(f"{self._key}/{block}".encode()).digest()
        generator = torch.Generator(device=self._device or "cpu")
        generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        rows = min(self._rows_per_block, self._shape[0] - block * self._rows_per_block)
        values = torch.empty(rows, *self._shape[1:], device=self._device)
        return values.normal_(self._centre, _DEVIATION, generator=generator)
