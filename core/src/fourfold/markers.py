"""The two decorators that plugin modules use."""

from __future__ import annotations

from typing import Final

import pluggy

ENTRY_POINT_GROUP: Final = "fourfold"
hookspec = pluggy.HookspecMarker(ENTRY_POINT_GROUP)
hookimpl = pluggy.HookimplMarker(ENTRY_POINT_GROUP)
