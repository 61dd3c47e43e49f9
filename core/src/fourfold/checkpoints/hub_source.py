"""The source ``hub``: org/name from the Hugging Face hub; what is in the local cache needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.checkpoints.progress import Progress
    from fourfold.entries import CheckpointContext

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG_FILES = ("config.json",)
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_LEFT_OUT = ("consolidated*", "*/*")
"""The publisher's second copy of the weights, and everything in subfolders."""


class HubSource:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        """Takes nothing from the context."""

    def locate(self, model: str, *, revision: str | None, progress: Progress, config_only: bool = False) -> Path | None:
        """A snapshot folder of the hub's own cache, downloaded if need be."""
        if not _HUB_ID.fullmatch(model):
            return None
        patterns = _CONFIG_FILES if config_only else _FILES
        return _cached(model, revision, patterns) or _downloaded(model, revision, patterns, progress)

    def names(self) -> Iterable[str]:
        """Models in the hub's local cache."""
        from huggingface_hub.constants import HF_HUB_CACHE

        for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
            yield folder.name.removeprefix("models--").replace("--", "/", 1)


def _cached(model: str, revision: str | None, patterns: tuple[str, ...]) -> Path | None:
    """The snapshot in the local cache, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_LEFT_OUT),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    return folder if _complete(folder, patterns) else None


def _complete(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a snapshot, which may hold only some files of its revision, has what a model needs."""
    if not (folder / "config.json").is_file():
        return False
    if patterns == _CONFIG_FILES:
        return True
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        from fourfold.checkpoints.json_file import read_json

        shards = set((read_json(index).get("weight_map") or {}).values())
        return all((folder / str(shard)).is_file() for shard in shards)
    return any(folder.glob("*.safetensors")) and any(folder.glob("tokenizer*"))


def _downloaded(model: str, revision: str | None, patterns: tuple[str, ...], progress: Progress) -> Path:
    """The snapshot, from the hub. Any failure is one CheckpointError with its cause."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision!r}" if revision else ""
    progress.task(f"downloading {model}", 1)
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_LEFT_OUT)
        )
    except GatedRepoError as error:
        raise CheckpointError(f"{model!r} is gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model!r} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {model!r}{at}, or it is private; check the name, or set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"{model!r} is no hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise CheckpointError(
            f"{model!r}{at} is not in the local hub cache and cannot be downloaded ({type(error).__name__}: "
            f"{_first_line(error)}); check the network, or give a local folder"
        ) from error
    progress.advance(1)
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
