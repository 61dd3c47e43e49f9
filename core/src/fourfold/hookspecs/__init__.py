"""Every point where a plugin can join the runtime. Knows the hooks' names and promises, never who implements them.

Four kinds of hook: *offers* (plural nouns, return a list of entries), *settings*, *check*, and *events* (past tense,
return nothing). Hooks run at assembly and at request or step edges, never per layer, token or collective.
"""

from __future__ import annotations

from typing import Final

from fourfold.hookspecs import lifecycle, models, ranks

CONTRACT_VERSION: Final = "1.0"
"""The version of these hooks and of all contracts; a plugin states the range that it is written for."""

MODULES: Final = (ranks, models, lifecycle)
"""Where the hook specifications are."""
