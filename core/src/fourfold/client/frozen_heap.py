"""Keeps the garbage collector from going through all that lives, in the middle of a batch of prompts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERPRETERS_OWN: Final = 5000
"""Objects at most that Python itself has frozen when it starts."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, what lived before is not looked at: with torch loaded that takes a tenth of a second each time.

    Leaves alone what somebody else has frozen.
    """
    if gc.get_freeze_count() > INTERPRETERS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
