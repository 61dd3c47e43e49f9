"""Headers of answers. Know no route."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LENGTH = 1024


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """``x-fourfold-ignored``: the fields that had no effect; nothing when all had."""
    if not ignored:
        return {}
    # Names are the client's own words, which a header holds only as printable ASCII.
    names = (name.encode("ascii", "backslashreplace").decode() for name in ignored)
    shown = ", ".join("".join(c if c.isprintable() and c != "," else "?" for c in name) for name in names)
    return {"x-fourfold-ignored": shown[:MAX_LENGTH]}
