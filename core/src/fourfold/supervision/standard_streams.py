"""Makes sure that a process has descriptors 0 to 2, which a service manager or a shell may have closed."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Point closed ones of standard input, output and error at /dev/null, here and for children.

    Otherwise the next socket would become standard error, and everything that is logged would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    # Python left these as None where their descriptor was closed when it started.
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # for the life of the process
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
