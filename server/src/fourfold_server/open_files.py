"""How many files, sockets and pipes this process may have open."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

from fourfold.errors import ConfigError

_LEAST: Final = 64
"""Descriptors for sockets, pipes and mapped files of this process or of an engine, with some for connections."""


def raise_open_file_limit() -> None:
    """Take as many as this user may have, since every connection takes one. Raises ConfigError for too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # refused in some sandboxes; what there is may do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < _LEAST:
        raise ConfigError(f"the limit of open files is {soft} (ulimit -n); {_LEAST} or more")
