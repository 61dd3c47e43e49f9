"""A part of a plugin that breaks while it is built is named, with the line, wherever it is built."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fourfold import hookimpl
from fourfold.config.options import build_engine_config
from fourfold.entries import Entry
from fourfold.errors import ConfigError, PluginError
from fourfold.offers import OFFER_KINDS
from fourfold.plugins import PluginRegistry, load_plugins
from fourfold.text.served_model import load_served_model
from fourfold_server.app import create_app
from fourfold_server.config import ServerConfig


def divide(context: object) -> Any:
    return 1 // 0


def refuse(context: object) -> Any:
    raise ConfigError("not on a Monday")


def registry(kind: str, build: Any) -> PluginRegistry:
    """What is installed, and an entry ``mine`` of this kind."""
    entry: type[Entry[Any]] = OFFER_KINDS[kind].entry
    module = ModuleType("acme")
    setattr(module, f"fourfold_{kind}", hookimpl(lambda: [entry(name="mine", build=build)]))
    return load_plugins(extra={"acme": module})


def build_tokenizer(registry: PluginRegistry) -> None:
    load_served_model(build_engine_config(tokenizer="mine"), registry)


def build_routes(registry: PluginRegistry) -> None:
    state: Any = SimpleNamespace(config=ServerConfig(), metrics=None)
    create_app(state, {"mine": registry.routes()["mine"]})


@pytest.mark.parametrize(("kind", "make"), [("tokenizers", build_tokenizer), ("routes", build_routes)])
def test_it_is_named_and_what_it_refuses_passes(kind: str, make: Any) -> None:
    noun = OFFER_KINDS[kind].noun
    place = r"\(test_broken_builds.py, line \d+, in divide\)"
    with pytest.raises(PluginError, match=rf"^{noun} 'mine' raised ZeroDivisionError: .* {place}; repair or uninstall"):
        make(registry(kind, divide))
    with pytest.raises(ConfigError, match=r"^not on a Monday$"):
        make(registry(kind, refuse))
