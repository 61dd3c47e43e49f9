"""Turns ``auto`` into names and numbers, once, before anything starts: a new config, and why. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype
from fourfold.entries import Entry
from fourfold.errors import ConfigError
from fourfold.plugins import PluginRegistry
from fourfold.selection import AUTO, COMM_GROUPS, LAYER_KINDS, names_by_key, select, select_parallel_layers

_BF16_FEATURES: Final = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A config without open questions for the engine, and what to log."""

    config: EngineConfig
    reasons: tuple[str, ...]
    """One line for each choice that was made."""


def resolve(config: EngineConfig, registry: PluginRegistry) -> Resolved:
    """Choose dtype, executor, scheduler and load balancer, check every name, and let plugins check the result.

    Backends of the workers (attention, linear methods, operators, parallel layers, communicators) stay ``auto``: ranks
    choose them where they run. Raises ConfigError for what cannot work, PluginError for what is not installed.
    """
    resolved, reason = settle(config, registry)
    reasons = [reason]
    for kind, field, entries in (
        ("executor", "executor", registry.executors()),
        ("scheduler", "scheduler", registry.schedulers()),
        ("load balancer", "load_balancer", registry.load_balancers()),
    ):
        table: Mapping[str, Entry[Any]] = entries
        selection = select(kind, table, getattr(resolved.backends, field), resolved)
        reasons.append(selection.reason)
        resolved = replace(resolved, backends=replace(resolved.backends, **{field: selection.entry.name}))
    _check_names(resolved, registry)
    _check_spread(resolved)
    registry.check_config(resolved)
    return Resolved(config=resolved, reasons=tuple(reasons))


def settle(config: EngineConfig, registry: PluginRegistry) -> tuple[EngineConfig, str]:
    """What backends are asked with whether they suit: the dtype is chosen (and why), and each wish is said in one way.

    Raises ConfigError for wishes that contradict each other.
    """
    dtype, reason = choose_dtype(config.model.dtype, accelerator(), cpu_features())
    settled = replace(config, model=replace(config.model, dtype=dtype), backends=_place_replicas(config.backends))
    return _spread_experts(settled, registry), reason


def _place_replicas(backends: BackendConfig) -> BackendConfig:
    """Who places replicas is the executor."""
    wanted, executor = backends.data_parallel_backend, backends.executor
    if wanted == AUTO:
        return backends
    if executor not in (AUTO, wanted):
        raise ConfigError(
            f"--data-parallel-backend is {wanted!r} and --executor {executor!r}: the executor places the replicas too; "
            "leave one of the options out"
        )
    return replace(backends, executor=wanted)


def _spread_experts(config: EngineConfig, registry: PluginRegistry) -> EngineConfig:
    """A moe layer that spreads experts over ranks says the same as --enable-expert-parallel."""
    offered = {name: entry for (kind, name), entry in registry.parallel_layers().items() if kind == "moe"}
    name = names_by_key("--parallel-layer", config.backends.parallel_layer, LAYER_KINDS)["moe"]
    if name not in offered or "expert_parallel" not in offered[name].capabilities:
        return config
    return replace(config, parallel=replace(config.parallel, enable_expert_parallel=True))


def _check_spread(config: EngineConfig) -> None:
    backends = config.backends
    asked = {
        "--all-to-all": backends.all_to_all,
        "--expert-placement": backends.expert_placement,
        "--rebalancer": backends.rebalancer,
    }
    for option, name in asked.items():
        if name != AUTO and not config.parallel.enable_expert_parallel:
            raise ConfigError(
                f"{option} is {name!r}, for experts that are spread over ranks; add --enable-expert-parallel, or leave "
                "it out"
            )


def choose_dtype(wanted: Dtype, device: str, features: Iterable[str]) -> tuple[Dtype, str]:
    """The precision to compute in on ``device``, and why; ``features`` are those of the CPU.

    Raises ConfigError for float16 on a CPU.
    """
    if wanted == "float16" and device == "cpu":
        raise ConfigError(
            "--dtype is float16, in which a CPU does not compute; use bfloat16, float32, or auto to let it choose"
        )
    if wanted != AUTO:
        return wanted, f"dtype {wanted}: asked for"
    if device != "cpu":
        return "bfloat16", f"dtype bfloat16 (auto): this host has a {device} device"
    found = sorted(_BF16_FEATURES.intersection(features))
    if found:
        return "bfloat16", f"dtype bfloat16 (auto): this cpu has {' and '.join(found)}"
    return "float32", f"dtype float32 (auto): this cpu has neither {' nor '.join(sorted(_BF16_FEATURES))}"


def accelerator() -> str:
    """``cuda`` where the kernel shows an NVIDIA device that is not hidden from this process, else ``cpu``.

    The one place that guesses without torch.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return "cuda" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def cpu_features() -> frozenset[str]:
    """The feature flags that Linux gives for the first core; empty where it gives none."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())


def _check_names(config: EngineConfig, registry: PluginRegistry) -> None:
    """Refuse backends of the workers that were asked for by name and are not installed or cannot run."""
    backends = config.backends
    tables: tuple[tuple[str, str, Mapping[str, Entry[Any]]], ...] = (
        ("attention backend", backends.attention, registry.attention_backends()),
        ("linear method", backends.linear_method, registry.linear_methods()),
        ("operators", backends.operators, registry.operators()),
        ("all-to-all", backends.all_to_all, registry.all_to_alls()),
        ("expert placement", backends.expert_placement, registry.expert_placements()),
        ("rebalancer", backends.rebalancer, registry.rebalancers()),
        ("experts", backends.experts, registry.experts()),
        ("tokenizer", config.model.tokenizer, registry.tokenizers()),
        ("checkpoint format", config.model.load_format, registry.checkpoint_formats()),
        *(
            ("communicator", name, registry.communicators())
            for name in dict.fromkeys(names_by_key("--comm", backends.comm, COMM_GROUPS).values())
        ),
    )
    for kind, name, entries in tables:
        if name != AUTO:
            select(kind, entries, name, config)
    layers = registry.parallel_layers()
    offered = {kind for kind, _ in layers}
    asked = names_by_key("--parallel-layer", backends.parallel_layer, LAYER_KINDS)
    one_for_all = "=" not in backends.parallel_layer
    wanted = [kind for kind in LAYER_KINDS if asked[kind] != AUTO and not (one_for_all and kind not in offered)]
    select_parallel_layers(layers, wanted, config)
