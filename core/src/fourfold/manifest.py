"""What all ranks of a deployment must have in common: plugins, and the config keys that shape what they exchange."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from fourfold.config.engine_config import EngineConfig
from fourfold.errors import ConfigError, PluginError
from fourfold.offers import Origin

# What may differ between hosts without changing a tensor's shape, an id or the order of collectives.
_LOCAL_KEYS: Final = frozenset(
    {
        "model.served_model_name",
        "model.chat_template",
        "cache.gpu_memory_utilization",
        "cache.kv_cache_memory",
        "scheduler.max_num_waiting",
        "timeouts.startup_timeout",
        "timeouts.rpc_timeout",
        "timeouts.stall_timeout",
        "timeouts.drain_timeout",
    }
)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs on, as it is compared with the first rank's before the first collective."""

    node: str
    """Host name."""
    rank: int
    plugins: tuple[tuple[str, str, str], ...]
    """(name, distribution, version), sorted."""
    config: dict[str, str]
    """Config key -> value, as JSON, for the keys that shape what ranks exchange."""

    @property
    def plugins_hash(self) -> str:
        """Equal for equal plugins."""
        return _digest(self.plugins)

    @property
    def config_hash(self) -> str:
        """Equal for equal shape-affecting config."""
        return _digest(self.config)


def fingerprint(config: EngineConfig, manifest: Sequence[Origin], *, rank: int) -> Fingerprint:
    """The fingerprint of this process; ``manifest`` is ``registry.manifest``."""
    return Fingerprint(
        node=os.uname().nodename,
        rank=rank,
        plugins=tuple(sorted((row.plugin, row.distribution, row.version) for row in manifest)),
        config=shaping_keys(config),
    )


def shaping_keys(config: EngineConfig) -> dict[str, str]:
    """``section.field`` -> JSON value of every key that must be equal on all ranks."""
    tree = msgspec.to_builtins(config)
    del tree["nodes"]  # what each node is: all differ, and one of them is secret
    flat: dict[str, str] = {}
    for section, fields in tree.items():
        for name, value in fields.items():
            if f"{section}.{name}" not in _LOCAL_KEYS:
                flat[f"{section}.{name}"] = msgspec.json.encode(value, order="sorted").decode()
    return flat


def compare(reference: Fingerprint, other: Fingerprint) -> None:
    """Refuse ``other`` unless it fits ``reference``.

    Raises PluginError for differing plugins and ConfigError for differing config; the message names both ranks, their
    hosts, and the first difference with both values.
    """
    if reference.plugins_hash != other.plugins_hash:
        plugin, here, there = _first_difference(_packages(reference), _packages(other))
        raise PluginError(
            f"{_where(other)} has {there} as plugin {plugin!r}, and {_where(reference)} has {here}; "
            "install the same plugins on every host"
        )
    if reference.config_hash != other.config_hash:
        key, here, there = _first_difference(reference.config, other.config)
        raise ConfigError(
            f"{_where(other)} has {key} = {there}, and {_where(reference)} has {here}; "
            "start all ranks with the same options"
        )


def compare_all(fingerprints: Sequence[Fingerprint]) -> None:
    """Refuse the first fingerprint that does not fit the first rank's; raises as ``compare`` does."""
    for other in fingerprints[1:]:
        compare(fingerprints[0], other)


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str]:
    """The first key, in order, whose values differ, and both values; only for mappings that do differ."""
    key = min(key for key in {*one, *other} if one.get(key) != other.get(key))
    return key, one.get(key, "nothing"), other.get(key, "nothing")


def _packages(side: Fingerprint) -> dict[str, str]:
    return {plugin: f"{distribution} {version}" for plugin, distribution, version in side.plugins}


def _where(side: Fingerprint) -> str:
    return f"rank {side.rank} on {side.node}"


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
