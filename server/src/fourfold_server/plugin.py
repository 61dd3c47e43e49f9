"""The server's own routes, offered through the same door as everyone else's. A table of contents."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from fourfold.entries import RoutesEntry
from fourfold.markers import hookimpl

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_routes() -> list[RoutesEntry]:
    """The OpenAI API, and what operators ask."""
    routers = [
        ("openai_completions", "fourfold_server.routes_completions:completions_router", "/v1/completions"),
        ("openai_chat", "fourfold_server.routes_chat:chat_router", "/v1/chat/completions"),
        ("openai_models", "fourfold_server.routes_models:models_router", "/v1/models"),
        ("tokenize", "fourfold_server.routes_tokenize:tokenize_router", "/tokenize, /detokenize"),
        ("operations", "fourfold_server.routes_operations:operations_router", "probes, /metrics, /version, /topology"),
        ("adapters", "fourfold_server.routes_adapters:adapters_router", "/v1/load_lora_adapter and its opposite"),
        ("admin", "fourfold_server.routes_admin:admin_router", "/admin"),
    ]
    return [RoutesEntry(name=name, build=_lazy(target), summary=summary) for name, target, summary in routers]


def _lazy(target: str) -> Callable[[Any], Any]:
    """A build function that imports ``module:qualname`` when it is called."""

    def build(state: Any) -> Any:
        return resolve_name(target)(state)

    return build
