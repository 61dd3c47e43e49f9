from __future__ import annotations

import logging
import math
import os

import pytest
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.errors import ConfigError
from fourfold.worker.cpu_device import CpuDevice, choose_cpu_dtype, choose_threads, cpu_features
from fourfold.worker.device import open_device


@pytest.mark.parametrize(
    ("wanted", "features", "dtype", "reason"),
    [
        ("auto", {"avx512_bf16"}, torch.bfloat16, "this cpu has avx512_bf16"),
        ("auto", {"amx_bf16", "avx512_bf16"}, torch.bfloat16, "this cpu has amx_bf16 and avx512_bf16"),
        ("auto", {"avx2"}, torch.float32, "neither avx512_bf16 nor amx_bf16"),
        ("float32", {"avx512_bf16"}, torch.float32, "asked for"),
        ("bfloat16", set(), torch.bfloat16, "asked for"),
    ],
)
def test_dtype(wanted, features, dtype, reason) -> None:
    choice = choose_cpu_dtype(wanted, frozenset(features))
    assert choice.dtype == dtype
    assert choice.name == str(dtype).removeprefix("torch.")
    assert reason in choice.reason


def test_float16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dtype is float16, .* use bfloat16, float32 or auto"):
        choose_cpu_dtype("float16", frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("cores", "workers", "variable", "threads"),
    [(8, 1, None, 8), (8, 3, None, 2), (2, 4, None, 1), (8, 2, "3", 3), (8, 2, "", 4), (8, 2, "0", 4), (8, 2, "x", 4)],
)
def test_threads(cores: int, workers: int, variable: str | None, threads: int) -> None:
    assert choose_threads(cores, workers, variable) == threads


def test_open_device_sets_threads_and_says_what_it_chose(monkeypatch, caplog) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        with caplog.at_level(logging.INFO, logger="fourfold.worker.device"):
            device = open_device(EngineConfig(model=ModelConfig(dtype="float32")), local_rank=0, local_workers=3)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (device.name, device.dtype, device.torch_device.type) == ("cpu", torch.float32, "cpu")
    assert "float32: asked for; 1 thread(s)" in caplog.text


def test_cache_bytes() -> None:
    device = CpuDevice(dtype=torch.float32)
    assert device.cache_bytes(CacheConfig(kv_cache_memory=12345), not_asked) == 12345
    assert 0 < device.cache_bytes(CacheConfig(), not_asked) <= 1 << 30
    many = CpuDevice(dtype=torch.float32, local_workers=1 << 20)
    assert many.cache_bytes(CacheConfig(), not_asked) < device.cache_bytes(CacheConfig(), not_asked)


def not_asked() -> int:
    raise AssertionError("a cpu needs no largest step")


def test_zeros_take_memory_only_when_touched() -> None:
    tensor = CpuDevice(dtype=torch.bfloat16).zeros((1 << 20, 1 << 10), torch.bfloat16)  # 2 GiB
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 1 << 31
    assert tensor.shape == (1 << 20, 1 << 10)
    assert tensor.data_ptr() % 4096 == 0
    tensor[-1] = 3
    assert (float(tensor[-1, -1]), float(tensor[0, 0])) == (3.0, 0.0)


def test_staging_is_shared_on_a_cpu() -> None:
    staging = CpuDevice(dtype=torch.float32).staging(64, kept=8)
    place = staging.claim()
    staging.hosts[place][:3] = 7
    staging.upload(place, 3)
    assert staging.device[:12].tolist() == [0] * 8 + [7] * 3 + [0]
    assert staging.device.data_ptr() % 64 == 0


def test_fetched_tensors_are_there_on_a_cpu() -> None:
    [array] = CpuDevice(dtype=torch.float32).fetch([torch.arange(3)]).wait()
    assert array.tolist() == [0, 1, 2]


def test_this_machine_says_its_features() -> None:
    assert "sse2" in cpu_features() or os.uname().machine != "x86_64"


def test_broken_rows() -> None:
    rows = torch.zeros(5, 40)
    rows[1, 7], rows[2, 39], rows[3, 0], rows[4, 1] = math.nan, math.inf, -math.inf, 3e38
    assert CpuDevice(dtype=torch.float32).broken_rows(rows).tolist() == [False, True, True, True, False]
