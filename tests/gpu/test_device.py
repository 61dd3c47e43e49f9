"""The device seam on a real device: copies, waits, and what it says of its memory."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.errors import ConfigError

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    from fourfold.worker.device import open_device

    return open_device(EngineConfig(), local_rank=0, local_workers=1)


def test_it_is_chosen_where_there_is_one(device) -> None:
    import torch

    assert (device.name, device.asynchronous, device.dtype) == ("cuda:0", True, torch.bfloat16)
    assert 0 < device.free_bytes <= device.memory_bytes


def test_a_rank_without_a_device_is_told() -> None:
    import torch

    from fourfold.worker.device import open_device

    with pytest.raises(ConfigError, match=r"rank 99 .* no device of its own, since the host shows \d+; lower"):
        open_device(EngineConfig(), local_rank=99, local_workers=100)
    assert torch.cuda.current_device() == 0


def test_uploads_keep_their_order_and_what_is_kept(device) -> None:
    staging = device.staging(1 << 20, kept=64)
    staging.device[:64].fill_(9)
    seen = []
    for value in range(20):
        place = staging.claim()
        staging.hosts[place][:] = value
        staging.upload(place, 1 << 20)
        seen.append(device.fetch([staging.device]))
    for value, fetch in enumerate(seen):
        [array] = fetch.wait()
        assert (array[:64] == 9).all()
        assert (array[64:] == value).all()


def test_a_fetch_is_of_the_moment_it_began(device) -> None:
    import torch

    tensor = torch.zeros(1 << 22, device=device.torch_device)
    fetches = []
    for _ in range(5):
        tensor += 1
        fetches.append(device.fetch([tensor, tensor[:1].long()]))
    for value, fetch in enumerate(fetches, start=1):
        for _ in range(2):
            whole, first = fetch.wait()
            assert (whole == value).all()
            assert first.tolist() == [value]


def test_broken_rows(device) -> None:
    rows = np.zeros((5, 3000), np.float32)
    rows[1, 7], rows[2, 2999], rows[3, 0] = np.nan, np.inf, -np.inf
    assert device.broken_rows(device.upload(rows)).tolist() == [False, True, True, True, False]


def test_cache_memory_is_what_is_left(device) -> None:
    import torch

    def hold() -> int:
        torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device)
        return 1 << 28

    share = CacheConfig(gpu_memory_utilization=0.5)
    without = device.cache_bytes(share, lambda: 0)
    assert without - device.cache_bytes(share, hold) == pytest.approx((1 << 30) + (1 << 28), rel=0.05)
    with pytest.raises(ConfigError, match=r"utilization 0.001 of .* raise it above 0\.\d+, or lower --max"):
        device.cache_bytes(CacheConfig(gpu_memory_utilization=0.001), hold)
