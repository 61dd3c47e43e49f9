from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def agent_store() -> Iterator[dist.TCPStore]:
    """The store that torchrun's agent would host."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # noqa: PT022


@pytest.fixture
def launched(agent_store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the only rank."""
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(agent_store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
