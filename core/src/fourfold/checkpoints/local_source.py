"""The source ``local``: a folder or a .gguf file on this host."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.checkpoints.progress import Progress
    from fourfold.entries import CheckpointContext


class LocalSource:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        """Takes nothing from the context."""

    def locate(self, model: str, *, revision: str | None, progress: Progress, config_only: bool = False) -> Path | None:
        """A path that exists; one that only looks like a path is an error here, not another source's."""
        try:
            path = Path(model).expanduser()
            exists = path.exists()
        except (OSError, RuntimeError) as error:  # a name too long, a folder that is closed to us, no such user
            raise CheckpointError(f"{model!r} cannot be looked up: {error}") from error
        if exists:
            if revision is not None:
                raise CheckpointError(f"--revision is {revision!r}, but {model!r} is a local path, which has none")
            return path.absolute()
        if model.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf":
            raise CheckpointError(f"there is no file or folder {model!r}")
        return None

    def names(self) -> Iterable[str]:
        """Model folders and .gguf files of the working folder."""
        with suppress(OSError):  # a working folder that is gone or closed to us only makes no suggestions
            for path in sorted(Path().iterdir()):
                if path.suffix == ".gguf" or (path / "config.json").is_file():
                    yield path.name
