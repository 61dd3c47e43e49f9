"""Lets threads compile kernels at once. Knows no kernel.

Before 3.11.8 and 3.12.2 Python counts the depth of the syntax trees that all threads build in one number, and raises
SystemError where two of them meet (python/cpython#106905).
"""

from __future__ import annotations

import functools
from threading import Lock
from typing import Any

from triton.runtime.jit import JITFunction


@functools.cache
def parse_one_at_a_time() -> None:
    """Have Triton build one syntax tree at a time in this process, which takes milliseconds of a compilation."""
    lock = Lock()
    parse = JITFunction.parse

    def parse_alone(self: Any) -> Any:
        with lock:
            return parse(self)

    JITFunction.parse = parse_alone
