"""What this distribution offers. A table of contents: the executor is imported when it is built."""

from __future__ import annotations

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
    for field in fields(settings):
        value = getattr(settings, field.name)
        if config.backends.executor != NAME and value != field.default:
            raise ConfigError(
                f"--ray-{field.name.replace('_', '-')} is {value!r}, and the executor is {config.backends.executor!r}; "
                f"use --executor {NAME}, or leave it out"
            )
    if config.backends.executor == NAME and replicas > 1 and not given_cluster(settings)[0]:
        raise ConfigError(
            f"--data-parallel-size is {replicas}, and no Ray cluster is given that replicas could share; start one "
            "with `ray start --head` and name it with --ray-address, or use --executor mp"
        )


def _build(context: ExecutorContext) -> Executor:
    from fourfold_executor_ray.executor import RayExecutor

    return RayExecutor(context)


def _suits(config: EngineConfig) -> Suitability:
    address, where = given_cluster(settings_of(config))
    if address:
        return Suitability(score=200, reason=f"the Ray cluster {address} is given ({where})")
    return Suitability(score=5, reason="no Ray cluster is given, so it would start one on this host")
