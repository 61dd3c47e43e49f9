"""The hub is never asked here: its library is replaced, or told to stay offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from fourfold.checkpoints.hub_source import HubSource
from fourfold.checkpoints.progress import NoProgress
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError


class Hub:
    """Stands in for snapshot_download."""

    def __init__(self) -> None:
        self.local: Path | None = None
        self.remote: Path | Exception = LocalEntryNotFoundError("no network\nlong explanation")
        self.asked: list[dict[str, Any]] = []

    def __call__(self, model: str, *, local_files_only: bool = False, **arguments: Any) -> str:
        self.asked.append({"model": model, "local": local_files_only, **arguments})
        if local_files_only:
            if self.local is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.local)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def locate(context: CheckpointContext) -> Callable[..., Path | None]:
    def run(model: str, **arguments: Any) -> Path | None:
        return HubSource(context).locate(model, progress=NoProgress(), **{"revision": None, **arguments})

    return run


def test_a_complete_snapshot_needs_no_network(hub: Hub, snapshot: Path, locate: Any) -> None:
    hub.local = snapshot
    assert locate("org/name", revision="v1") == snapshot
    assert [(one["local"], one["revision"]) for one in hub.asked] == [(True, "v1")]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_snapshot_is_completed(hub: Hub, snapshot: Path, locate: Any, missing: str) -> None:
    hub.local = hub.remote = snapshot
    (snapshot / missing).unlink()
    locate("org/name")
    assert [one["local"] for one in hub.asked] == [True, False]


def test_a_missing_shard_is_fetched(hub: Hub, snapshot: Path, locate: Any) -> None:
    hub.local = hub.remote = snapshot
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "a.safetensors").write_text("")
    locate("org/name")
    assert [one["local"] for one in hub.asked] == [True, False]
    (snapshot / "b.safetensors").write_text("")
    locate("org/name")
    assert [one["local"] for one in hub.asked] == [True, False, True]


def test_a_description_fetches_no_weights(hub: Hub, snapshot: Path, locate: Any) -> None:
    hub.remote = snapshot
    locate("org/name", config_only=True)
    assert hub.asked[-1]["allow_patterns"] == ["config.json"]
    locate("org/name")
    assert "*.safetensors" in hub.asked[-1]["allow_patterns"]


@pytest.mark.parametrize("name", ["smollm2", "a/b/c", "./a/b", "/abs", "a b/c"])
def test_other_names_are_not_the_hubs(hub: Hub, locate: Any, name: str) -> None:
    assert locate(name) is None
    assert hub.asked == []


def response() -> httpx.Response:
    return httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            LocalEntryNotFoundError("no network\nlong explanation"),
            r"'org/name' at revision 'v9' is not in the local hub cache .*: no network\); check the network, or give a",
        ),
        (httpx.ConnectError("refused"), r"cannot be downloaded \(ConnectError: refused\)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RepositoryNotFoundError("x", response=response()), "the hub has no model 'org/name'.*set HF_TOKEN"),
        (RevisionNotFoundError("x", response=response()), "'org/name' has no revision 'v9' on the hub"),
    ],
)
def test_failures_are_one_clear_error(hub: Hub, locate: Any, failure: Exception, message: str) -> None:
    hub.remote = failure
    with pytest.raises(CheckpointError, match=message):
        locate("org/name", revision="v9")


def test_cached_models_are_suggested(
    context: CheckpointContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models--org--some--name").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert list(HubSource(context).names()) == ["org/some--name"]
