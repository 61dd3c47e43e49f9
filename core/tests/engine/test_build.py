from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fourfold import builtin_plugin
from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.options import build_engine_config
from fourfold.contracts.kv_cache_spec import KVCacheSpec
from fourfold.engine import build
from fourfold.entries import ExecutorContext, ExecutorEntry
from fourfold.errors import CheckpointError, ConfigError, EngineError, ExecutorFailed, PluginError, WorkerError
from fourfold.markers import hookimpl
from fourfold.messages import InitializeCache, WorkerInfo
from fourfold.plugins import PluginRegistry, load_plugins


@dataclass
class FakeExecutor:
    """Answers as one rank; fails in the method called ``broken``."""

    broken: str = ""
    type_name: str = "ValueError"
    calls: list[str] = field(default_factory=list)
    cache: InitializeCache | None = None
    context: ExecutorContext | None = None
    callbacks: list[Callable[[EngineError], None]] = field(default_factory=list)
    world_size: int = 1
    output_rank: int = 0
    max_in_flight: int = 2

    def collective_rpc(self, method: str, *, args: tuple[bytes, ...] = (), **options: Any) -> list[Any]:
        self.calls.append(method)
        if method == self.broken:
            raise WorkerError(0, method, self.type_name, "boom")
        if method == "initialize_cache":
            self.cache = msgspec.msgpack.decode(args[0], type=InitializeCache)
        if method == "load":
            spec = KVCacheSpec(block_size=16, bytes_per_block=1024)
            info = WorkerInfo(
                rank=0,
                device="a cpu",
                dtype="float32",
                available_bytes=2**20,
                kv_cache_specs={0: spec, 1: spec},
                backends={"attention": "torch"},
            )
            return [msgspec.msgpack.encode(info)]
        return [None]

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        self.callbacks.append(callback)

    def processes(self) -> list[dict[str, Any]]:
        return [{"role": "worker", "label": "DP0.PP0.TP0"}]

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        if self.broken == "shutdown too":
            raise RuntimeError("shutdown failed as well")


def _registry(executor: Any, lost: list[tuple[int, str]] | None = None) -> PluginRegistry:
    def start(context: ExecutorContext) -> Any:
        executor.context = context
        return executor

    class Plugin:
        @hookimpl
        def fourfold_executors(self) -> list[ExecutorEntry]:
            return [ExecutorEntry(name="fake", build=start)]

        @hookimpl
        def fourfold_worker_lost(self, rank: int, cause: str) -> None:
            (lost if lost is not None else []).append((rank, cause))

    return load_plugins(entry_points=False, extra={"core": builtin_plugin, "fake": Plugin()})


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    description = SimpleNamespace(vocab_size=1000, max_model_len=512, num_heads=4, num_kv_heads=2, num_layers=2)
    monkeypatch.setattr(build, "describe_checkpoint", lambda config, registry, progress: description)


def test_an_engine_is_ready_after_a_forward_pass() -> None:
    executor = FakeExecutor()
    built = build.build_engine(EngineConfig(), _registry(executor), dp_rank=3)
    assert executor.calls == ["load", "initialize_cache", "warm_up", "settle"]
    assert executor.context is not None
    assert executor.context.dp_rank == 3
    assert executor.cache is not None
    assert executor.cache.cache.num_blocks == built.ready.num_blocks == 2**20 // 2048
    ready = built.ready
    assert (ready.engine, ready.device, ready.dtype, ready.max_model_len) == (3, "a cpu", "float32", 512)
    assert (ready.kv_cache_tokens, ready.kv_cache_bytes) == (511 * 16, 2**20)
    assert ready.workers == executor.processes()
    assert ready.backends == {"executor": "fake", "scheduler": "fcfs", "attention": "torch"}
    assert not built.core.has_work
    built.core.shutdown()
    assert executor.calls[-1] == "shutdown"


def test_max_model_len_of_the_user_goes_first() -> None:
    config = EngineConfig(model=ModelConfig(max_model_len=64))
    assert build.build_engine(config, _registry(FakeExecutor())).ready.max_model_len == 64


@pytest.mark.parametrize("method", ["load", "initialize_cache", "warm_up"])
def test_a_rank_that_fails_ends_the_ranks_and_is_the_error(method: str) -> None:
    executor = FakeExecutor(broken=method)
    with pytest.raises(WorkerError, match=f"rank 0 failed in {method}: ValueError: boom"):
        build.build_engine(EngineConfig(), _registry(executor))
    assert executor.calls[-1] == "shutdown"


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, PluginError])
def test_what_a_rank_refuses_is_what_it_was_for_the_user(kind: type[Exception]) -> None:
    executor = FakeExecutor(broken="load", type_name=kind.__name__)
    with pytest.raises(kind, match=r"^boom$") as caught:
        build.build_engine(EngineConfig(), _registry(executor))
    assert type(caught.value) is kind
    assert executor.calls[-1] == "shutdown"


def test_a_cache_that_is_too_small_ends_the_ranks_whatever_their_end_brings() -> None:
    executor = FakeExecutor(broken="shutdown too")
    config = EngineConfig(model=ModelConfig(max_model_len=100_000))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        build.build_engine(config, _registry(executor))
    assert executor.calls == ["load", "shutdown"]


def test_a_policy_that_is_not_there_is_said_before_anything_starts() -> None:
    executor = FakeExecutor()
    config = EngineConfig(backends=BackendConfig(scheduler="fcsf"))
    with pytest.raises(PluginError, match="did you mean 'fcfs'"):
        build.build_engine(config, _registry(executor))
    assert executor.calls == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_expert_parallel": True}, "a DenseModel has no experts to spread over ranks"),
        ({"enable_dbo": True}, "--enable-dbo overlaps what ranks tell each other, and none does here"),
        ({"experts": "torch"}, "--experts is 'torch', and a DenseModel has no experts; leave it out"),
    ],
)
def test_options_of_experts_need_some(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str) -> None:
    description = SimpleNamespace(num_heads=4, num_kv_heads=2, num_layers=2, architecture="a DenseModel", mixture=None)
    monkeypatch.setattr(build, "describe_checkpoint", lambda config, registry, progress: description)
    with pytest.raises(ConfigError, match=says):
        build.build_engine(build_engine_config(**options), _registry(FakeExecutor()))


def test_plugins_hear_of_a_lost_worker() -> None:
    executor, lost = FakeExecutor(), list[tuple[int, str]]()
    build.build_engine(EngineConfig(), _registry(executor, lost))
    executor.callbacks[0](WorkerError(1, "execute_model", "ValueError", "boom"))
    executor.callbacks[0](ExecutorFailed("rank 0 was killed", rank=0))
    executor.callbacks[0](ExecutorFailed("no rank's fault"))
    assert lost == [(1, "rank 1 failed in execute_model: ValueError: boom"), (0, "rank 0 was killed")]
