"""What an engine says when it is ready, for tests to which most of that does not matter."""

from __future__ import annotations

from typing import Any, Final

from fourfold.messages import EngineReady

_SMALL: Final[dict[str, Any]] = {
    "incarnation": 1,
    "num_blocks": 8,
    "kv_cache_tokens": 128,
    "kv_cache_bytes": 1024,
    "max_model_len": 64,
    "device": "cpu",
    "dtype": "float32",
    "backends": {},
}


def ready_engine(engine: int, **known: Any) -> EngineReady:
    """A small one; ``known`` are fields of EngineReady that a test cares for."""
    return EngineReady(engine=engine, **_SMALL | known)
