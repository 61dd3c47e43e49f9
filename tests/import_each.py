"""Imports each of the modules named on standard input as if it were the first; prints those that fail.

What they all import of others (the arguments) is imported once, and a process is forked off for each module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import warnings


def fails(module: str) -> bool:
    """Whether a process in which nothing else of the project is imported cannot import ``module``."""
    child = os.fork()
    if child == 0:
        warnings.simplefilter("error")
        try:
            importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # an extra that is not installed here
            importlib.import_module(name)
    for module in sys.stdin.read().split():
        if fails(module):
            print(module)
