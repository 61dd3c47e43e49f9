from __future__ import annotations

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import CommunicatorContext
from fourfold.plugins import load_plugins
from fourfold.selection import select


def test_shm_is_taken_before_gloo() -> None:
    entries = {name: entry for name, entry in load_plugins().communicators().items() if name in ("shm", "gloo")}
    assert select("communicator", entries, "auto", EngineConfig()).entry.name == "shm"
    assert entries["shm"].capabilities == {"cpu", "deterministic", "one_host", "peer_memory"}


def test_gloo_is_for_cpus() -> None:
    import pytest

    from fourfold.errors import Unsupported
    from fourfold_comm_cpu.gloo import build

    context = CommunicatorContext(
        group="tp", ranks=(0, 1), rank=0, device=torch.device("cuda"), store=None, timeout=1.0
    )
    with pytest.raises(Unsupported, match="not on cuda"):
        build(context)
