from __future__ import annotations

from dataclasses import dataclass

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.options import build_engine_config
from fourfold.config.transport import decode_config, encode_config
from fourfold.errors import ConfigError, PluginError
from fourfold.markers import hookimpl
from fourfold.plugins import load_plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    level: int = 3
    """A level."""
    names: tuple[str, ...] = ()
    """Names."""

    def __post_init__(self) -> None:
        if self.level < 0:
            raise ConfigError(f"--extra-level is {self.level}; 0 or more")


class Plugin:
    @hookimpl
    def fourfold_settings(self) -> type[Settings]:
        return Settings


REGISTRY = load_plugins(entry_points=False, extra={"extra": Plugin()})


def test_a_config_arrives_as_it_was() -> None:
    config = build_engine_config(
        REGISTRY.settings(),
        model="m",
        served_model_name=("a", "b"),
        kv_cache_memory="2GiB",
        rpc_timeout=1.5,
        extra_level=7,
        extra_names=("x", "y"),
    )
    arrived = decode_config(encode_config(config), REGISTRY)
    assert arrived == config
    assert arrived.plugins["extra"] == Settings(level=7, names=("x", "y"))
    assert decode_config(encode_config(EngineConfig()), REGISTRY) == EngineConfig()


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"{", ConfigError, "the config that another process sent does not fit this one"),
        (b'{"model": {"dtype": "int3"}}', ConfigError, "does not fit this one: Invalid enum value 'int3'"),
        (b'{"model": {"max_model_len": 1}}', ConfigError, "--max-model-len is 1"),
        (b'{"plugins": {"extra": {"level": "x"}}}', ConfigError, "Expected `int`, got `str`"),
        (b'{"plugins": {"extra": {"level": -1}}}', ConfigError, "--extra-level is -1"),
        (b'{"plugins": {"other": {}}}', PluginError, "plugin 'other', which offers none in this process"),
    ],
)
def test_what_does_not_fit_is_refused(content: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        decode_config(content, REGISTRY)


def test_what_is_sent_names_its_fields() -> None:
    assert b'"dtype":"float32"' in encode_config(EngineConfig(model=ModelConfig(dtype="float32")))
