"""The options of this plugin, and which cluster they mean."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

from fourfold.config.engine_config import EngineConfig

PLUGIN: Final = "ray"
LOCAL: Final = "local"
"""A new cluster, on this host, for one engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySettings:
    """Where ranks run."""

    address: str = ""
    """The Ray cluster: HOST:PORT, auto for one that has a node on this host, local for a new one on this host alone;
    by default RAY_ADDRESS, or the one that the program is connected to, or a new one.
    """
    placement: Literal["pack", "spread", "strict-pack"] = "pack"
    """How pipeline stages are laid over nodes: pack, on few; spread, on different ones; strict-pack, all on one. The
    ranks of a stage are on one node if any is large enough.
    """
    placement_group: str = ""
    """The name of a placement group that is there already; by default the one that the program runs in, or a new
    one.
    """

    namespace: str = ""
    """The namespace that the placement group was named in; by default that of the program, if it is connected."""


def settings_of(config: EngineConfig) -> RaySettings:
    """What was set, or the defaults for a config that was made in code."""
    found = config.plugins.get(PLUGIN)
    return found if isinstance(found, RaySettings) else RaySettings()


def connected_ray() -> Any:
    """The module ray, if the program that this is part of is connected to a cluster; else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def given_cluster(settings: RaySettings) -> tuple[str, str]:
    """The address of the cluster that somebody named, and where; two empty texts if nobody did."""
    if settings.address:
        return ("", "") if settings.address == LOCAL else (settings.address, "--ray-address")
    ray = connected_ray()
    if ray is not None:
        return ray.get_runtime_context().gcs_address, "ray.init in this program"
    address = os.environ.get("RAY_ADDRESS", "")
    return ("", "") if address in ("", LOCAL) else (address, "RAY_ADDRESS")
