"""What a node and a listener say to each other beside what their owners do: who is there, and who is not any more."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

PROTOCOL: Final = 1
"""Grows when what travels between nodes changes."""
BEAT_SECONDS: Final = 0.5
"""Between two signs of life."""
SILENCE_SECONDS: Final = 4.0
"""Without any, after which the other side is taken for lost."""
LINGER_SECONDS: Final = 1.0
"""For the last words."""


class Kind(IntEnum):
    """The first byte of a message."""

    HELLO = 1
    """From a node: a Hello."""
    WELCOME = 2
    """To a node: it belongs to the deployment now; what its owner wants it to know."""
    REFUSED = 3
    """To a node: why it does not."""
    BEAT = 4
    """A sign of life."""
    DATA = 5
    """The owners' own."""
    BYE = 6
    """The last word: why."""


KINDS: Final = {kind: bytes([kind]) for kind in Kind}
"""As they travel."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """How a node introduces itself."""

    protocol: int
    node: str
    body: bytes
    """For the owner of the listener."""
