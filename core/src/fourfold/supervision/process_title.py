"""What a process is called: in its title, in front of its log lines, and in `fourfold ps`."""

from __future__ import annotations

import logging
import sys

import setproctitle


def name_process(role: str, label: str = "", *, log_level: str = "info") -> None:
    """Set the title ``fourfold <role> <label>`` and log to stderr with the same prefix.

    ``role`` is api_server, engine_core, worker or coordinator; ``label`` such as ``DP0.PP1.TP3``.
    """
    name = f"{role} {label}".strip()
    setproctitle.setproctitle(f"fourfold {name}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d [{name}] %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
