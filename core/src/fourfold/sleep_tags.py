"""What of an engine's memory sleeps and wakes up, by the names that operators use."""

from __future__ import annotations

from typing import Final

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
TAGS: Final = (WEIGHTS, KV_CACHE)
