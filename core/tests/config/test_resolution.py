"""Resolving a config: dtype, names, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fourfold import hookimpl
from fourfold.config import resolution
from fourfold.config.options import build_engine_config
from fourfold.config.resolution import choose_dtype, resolve
from fourfold.entries import (
    AllToAllEntry,
    AttentionBackendEntry,
    ExecutorEntry,
    ExpertPlacementEntry,
    LoadBalancerEntry,
    ParallelLayerEntry,
    RebalancerEntry,
    SchedulerEntry,
    Suitability,
)
from fourfold.errors import ConfigError, PluginError
from fourfold.plugins import load_plugins


def nothing(context):
    return None


def one_rank(config):
    if config.parallel.layout.engine_world_size == 1:
        return Suitability(score=100, reason="one rank")
    return Suitability(score=0, reason="runs one rank; install another")


class Sample:
    @hookimpl
    def fourfold_executors(self):
        return [ExecutorEntry(name="single", build=nothing, suits=one_rank)]

    @hookimpl
    def fourfold_schedulers(self):
        return [SchedulerEntry(name="fcfs", build=nothing)]

    @hookimpl
    def fourfold_load_balancers(self):
        return [LoadBalancerEntry(name="first", build=nothing)]

    @hookimpl
    def fourfold_attention_backends(self):
        def suits(config):
            return Suitability(score=int(config.model.dtype == "bfloat16"), reason="bfloat16 only")

        return [AttentionBackendEntry(name="fast", build=nothing, suits=suits)]

    @hookimpl
    def fourfold_parallel_layers(self):
        spread = frozenset({"expert_parallel"})
        return [
            ParallelLayerEntry(name="tp", kind="row", build=nothing),
            ParallelLayerEntry(name="tp", kind="moe", build=nothing),
            ParallelLayerEntry(name="spread", kind="moe", build=nothing, capabilities=spread),
        ]

    @hookimpl
    def fourfold_check_config(self, config):
        if config.backends.executor == "auto" or config.model.dtype == "auto":
            raise ConfigError("checked too early")
        if config.model.seed == 13:
            raise ConfigError("--seed is 13; bad luck")


@pytest.fixture
def registry():
    return load_plugins(entry_points=False, extra={"sample": Sample()})


@pytest.fixture(autouse=True)
def on_a_plain_cpu(monkeypatch):
    monkeypatch.setattr(resolution, "accelerator", lambda: "cpu")
    monkeypatch.setattr(resolution, "cpu_features", lambda: frozenset({"avx512_bf16"}))


def test_auto_becomes_names_and_reasons(registry):
    config = build_engine_config()
    resolved = resolve(config, registry)
    assert resolved.config.model.dtype == "bfloat16"
    assert resolved.config.backends.executor == "single"
    assert resolved.config.backends.load_balancer == "first"
    assert resolved.config.backends.attention == "auto"
    assert resolved.reasons == (
        "dtype bfloat16 (auto): this cpu has avx512_bf16",
        "executor 'single' (auto): one rank",
        "scheduler 'fcfs' (default)",
        "load balancer 'first' (auto): runs anywhere",
    )
    assert config == build_engine_config()


def test_resolving_again_changes_nothing(registry):
    once = resolve(build_engine_config(), registry).config
    assert resolve(once, registry).config == once


def test_who_places_replicas_is_the_executor(registry):
    assert resolve(build_engine_config(data_parallel_backend="single"), registry).config.backends.executor == "single"
    with pytest.raises(ConfigError, match="--data-parallel-backend is 'single' and --executor 'other': the executor"):
        resolve(build_engine_config(data_parallel_backend="single", executor="other"), registry)
    with pytest.raises(PluginError, match="no executor called 'singel'; did you mean 'single'"):
        resolve(build_engine_config(data_parallel_backend="singel"), registry)


@pytest.mark.parametrize(
    ("wanted", "device", "features", "dtype"),
    [
        ("auto", "cpu", {"avx512_bf16"}, "bfloat16"),
        ("auto", "cpu", {"amx_bf16", "avx2"}, "bfloat16"),
        ("auto", "cpu", {"avx2", "avx512f"}, "float32"),
        ("auto", "cuda", set(), "bfloat16"),
        ("float16", "cuda", set(), "float16"),
        ("float32", "cpu", {"avx512_bf16"}, "float32"),
        ("bfloat16", "cpu", set(), "bfloat16"),
    ],
)
def test_dtypes(wanted, device, features, dtype):
    found, reason = choose_dtype(wanted, device, features)
    assert found == dtype
    assert reason.startswith(f"dtype {dtype}")


def test_float16_on_a_cpu_is_refused(registry):
    with pytest.raises(ConfigError, match=r"--dtype is float16.*use bfloat16, float32"):
        resolve(build_engine_config(dtype="float16"), registry)


def test_ranks_that_no_executor_can_run_are_refused_with_what_is_installed(registry):
    with pytest.raises(ConfigError, match="no executor can run here: single: runs one rank; install another"):
        resolve(build_engine_config(tensor_parallel_size=2), registry)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("comm", "broken", "no communicator called 'broken'"),
        ("comm", "tp=broken", "no communicator called 'broken'"),
        ("attention", "fas", "no attention backend called 'fas'; did you mean 'fast'"),
        ("linear_method", "x", "no linear method called 'x'"),
        ("operators", "x", "no operators called 'x'"),
        ("tokenizer", "x", "no tokenizer called 'x'"),
        ("load_format", "x", "no checkpoint format called 'x'"),
        ("scheduler", "x", "no scheduler called 'x'"),
        ("parallel_layer", "moe=ep", "no moe parallel layer called 'ep'"),
        ("parallel_layer", "ep", "no row parallel layer called 'ep'"),
    ],
)
def test_names_of_what_is_not_installed_are_refused_even_when_not_needed(registry, field, value, says):
    with pytest.raises(PluginError, match=says):
        resolve(build_engine_config(**{field: value}), registry)


def test_a_backend_that_cannot_run_with_the_dtype_is_refused(registry):
    resolve(build_engine_config(attention="fast"), registry)
    resolve(build_engine_config(parallel_layer="tp"), registry)
    with pytest.raises(ConfigError, match="attention backend 'fast' cannot run here: bfloat16 only"):
        resolve(build_engine_config(attention="fast", dtype="float32"), registry)


@pytest.mark.parametrize(("layer", "spreads"), [("auto", False), ("moe=tp", False), ("moe=spread,row=tp", True)])
def test_a_layer_that_spreads_experts_says_the_same_as_the_flag(registry, layer, spreads):
    config = build_engine_config(parallel_layer=layer, data_parallel_size=2)
    resolved = resolve(config, registry).config.parallel
    assert (resolved.enable_expert_parallel, resolved.lockstep) == (spreads, spreads)


def test_plugins_check_the_finished_config(registry):
    with pytest.raises(ConfigError, match="bad luck"):
        resolve(build_engine_config(seed=13), registry)


def test_resolution_needs_no_torch():
    code = (
        "import sys; from fourfold.config.resolution import resolve; from fourfold.plugins import load_plugins\n"
        "from fourfold.config.options import build_engine_config; resolve(build_engine_config(), load_plugins())\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("field", ["all_to_all", "expert_placement", "rebalancer"])
def test_ways_of_experts_that_are_not_spread_are_refused(field):
    class Spreading(Sample):
        @hookimpl
        def fourfold_all_to_alls(self):
            return [AllToAllEntry(name="it", build=nothing)]

        @hookimpl
        def fourfold_expert_placements(self):
            return [ExpertPlacementEntry(name="it", build=nothing)]

        @hookimpl
        def fourfold_rebalancers(self):
            return [RebalancerEntry(name="it", build=nothing)]

    registry = load_plugins(entry_points=False, extra={"spreading": Spreading()})
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} is 'it', for experts that are spread .* --enable-expert-parallel"):
        resolve(build_engine_config(**{field: "it"}), registry)
    resolve(build_engine_config(**{field: "it", "enable_expert_parallel": True}), registry)
    resolve(build_engine_config(**{field: "it", "parallel_layer": "moe=spread"}), registry)
