"""What a LoRA adapter may be called. Knows no adapter."""

from __future__ import annotations

MAX_LENGTH = 256


def fault_of_name(name: str) -> str | None:
    """What is wrong with a name, as the end of a sentence about it; None: nothing."""
    if len(name) > MAX_LENGTH:
        return f"has {len(name)} characters; {MAX_LENGTH} at most"
    if not name.isprintable():
        return "has characters that cannot be printed; choose a name without"
    return None
