"""The config as bytes between processes: JSON that is checked again, field by field, where it arrives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from fourfold.config.engine_config import EngineConfig
from fourfold.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from fourfold.plugins import PluginRegistry


def encode_config(config: EngineConfig) -> bytes:
    """The config as JSON."""
    return msgspec.json.encode(config)


def decode_config(content: bytes, registry: PluginRegistry) -> EngineConfig:
    """The config that ``encode_config`` wrote; ``registry`` knows the types of plugin settings.

    Raises ConfigError for what does not fit, PluginError for settings of a plugin that is not installed here.
    """
    try:
        config = msgspec.json.decode(content, type=EngineConfig)
        settings = registry.settings()
        return dataclasses.replace(
            config,
            plugins={
                name: msgspec.convert(values, _settings_type(name, settings)) for name, values in config.plugins.items()
            },
        )
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the config that another process sent does not fit this one: {error}") from error


def _settings_type(name: str, settings: dict[str, type[Any]]) -> type[Any]:
    if name not in settings:
        raise PluginError(
            f"the config has settings of plugin {name!r}, which offers none in this process; "
            "install the same plugins everywhere"
        )
    return settings[name]
