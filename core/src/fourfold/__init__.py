"""fourfold: serves large language models on a small core plus plugins. Importing it imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.client.llm import LLM
    from fourfold.errors import ConfigError, EngineError, FourfoldError, PluginError, RequestError
    from fourfold.markers import hookimpl
    from fourfold.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "ConfigError",
    "EngineError",
    "FourfoldError",
    "PluginError",
    "RequestError",
    "SamplingParams",
    "hookimpl",
]

_HOMES = {
    "LLM": "fourfold.client.llm",
    "ConfigError": "fourfold.errors",
    "EngineError": "fourfold.errors",
    "FourfoldError": "fourfold.errors",
    "PluginError": "fourfold.errors",
    "RequestError": "fourfold.errors",
    "SamplingParams": "fourfold.sampling_params",
    "hookimpl": "fourfold.markers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fourfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
