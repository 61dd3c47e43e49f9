"""What this distribution offers. A table of contents: the executor is imported when it is built."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from fourfold.entries import ExecutorContext, ExecutorEntry, Suitability
from fourfold.errors import ConfigError
from fourfold.markers import hookimpl
from fourfold_executor_ray.settings import RaySettings, given_cluster, settings_of

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.executor import Executor

FOURFOLD_CONTRACT = ">=1.0,<2"
NAME = "ray"


@hookimpl
def fourfold_executors() -> list[ExecutorEntry]:
    """Offer ``ray``."""
    return [
        ExecutorEntry(
            name=NAME,
            build=_build,
            summary="an actor per rank, on the nodes of a Ray cluster",
            capabilities=frozenset({"processes"}),
            suits=_suits,
        )
    ]


@hookimpl
def fourfold_settings() -> type[RaySettings]:
    return RaySettings


@hookimpl
def fourfold_check_config(config: EngineConfig) -> None:
    replicas, settings = config.parallel.data_parallel_size, settings_of(config)
    chosen = config.backends.executor == NAME
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not chosen and value != field.default:
            raise ConfigError(
                f"--ray-{field.name.replace('_', '-')} is {value!r}, and the executor is {config.backends.executor!r}; "
                f"use --executor {NAME}, or leave it out"
            )
    address, where = given_cluster(settings) if chosen else ("", "")
    if "://" in address:
        raise ConfigError(
            f"{where} is {address!r}, for programs outside the cluster; start fourfold on a node of it, and give the "
            "HOST:PORT that `ray start` prints, or auto"
        )
    if chosen and replicas > 1 and not address:
        raise ConfigError(
            f"--data-parallel-size is {replicas}, and no Ray cluster is given that replicas could share; start one "
            "with `ray start --head` and name it with --ray-address, or use --executor mp"
        )
    nodes = config.nodes
    alone = not nodes.headless and nodes.data_parallel_size_local is None
    if chosen and alone and nodes.node_interface is not None:
        raise ConfigError(
            f"--node-interface is {nodes.node_interface!r}, and ranks reach each other as the nodes of the Ray cluster "
            "do; leave it out, and give each node its address by `ray start --node-ip-address`"
        )


def _build(context: ExecutorContext) -> Executor:
    from fourfold_executor_ray.executor import RayExecutor

    return RayExecutor(context)


def _suits(config: EngineConfig) -> Suitability:
    if config.nodes.nnodes > 1:
        reason = f"--nnodes is {config.nodes.nnodes}, and Ray finds its nodes by itself; leave the option out"
        return Suitability(score=0, reason=reason)
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        return Suitability(score=0, reason="the package ray is not installed; pip install ray")
    address, where = given_cluster(settings_of(config))
    if address:
        return Suitability(score=200, reason=f"the Ray cluster {address} is given ({where})")
    return Suitability(score=5, reason="no Ray cluster is given, so it would start one on this host")
