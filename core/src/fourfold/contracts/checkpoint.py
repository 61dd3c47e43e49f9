"""The checkpoint contracts: where a model comes from, and how its tensors are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fourfold.contracts.parallel_layer import TensorSlices

if TYPE_CHECKING:
    from fourfold.checkpoints.progress import Progress


class CheckpointSource(Protocol):
    """Turns a model name into a local path. Imports no torch."""

    def locate(self, model: str, *, revision: str | None, progress: Progress, config_only: bool = False) -> Path | None:
        """The folder or file of ``model``, or None if this source does not know the name.

        With ``config_only`` a folder need hold no more than config.json. Raises CheckpointError when the name is this
        source's but the model cannot be had.
        """

    def names(self) -> Iterable[str]:
        """Models that this source can have without asking a network; for suggestions."""


class CheckpointFormat(Protocol):
    """Turns a located path into a folder with config.json and a tokenizer, and reads its tensors."""

    def recognizes(self, path: Path) -> bool:
        """Whether ``path`` is of this format."""

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """The config.json of ``path``, without converting or reading tensors. Imports no torch."""

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """A folder with config.json, tokenizer.json and tensors; converts once if need be. Imports no torch."""

    def open(self, folder: Path) -> AbstractContextManager[TensorReader]:
        """Open a prepared folder's tensors; mapped, not read."""


class TensorReader(Protocol):
    """The tensors of one checkpoint by name."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> TensorSlices:
        """Raises CheckpointError for a name that is not there, or a tensor that is truncated."""
