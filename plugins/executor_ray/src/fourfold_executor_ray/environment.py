"""Which variables of the executor's process its ranks have too, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

_OF_ONE_RANK: Final = frozenset({"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
_OF_ONE_NODE: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "GLOO_SOCKET_IFNAME",
        "HOME",
        "HOSTNAME",
        "HOST_IP",
        "LOGNAME",
        "NCCL_SOCKET_IFNAME",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "TERM",
        "TMPDIR",
        "TP_SOCKET_IFNAME",
        "USER",
        "VIRTUAL_ENV",
        "XDG_RUNTIME_DIR",
        "_",
    }
)
_PREFIXES: Final = ("RAY_", "SSH_", "_FOURFOLD_")
"""Of Ray, a login and a process; they mean nothing elsewhere."""


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that travel: all but what belongs to one rank, one node or one process."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_ONE_RANK and name not in _OF_ONE_NODE and not name.startswith(_PREFIXES)
    }


def apply_variables(shared: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Set those that are not there: what a node says of itself holds."""
    for name, value in shared.items():
        environment.setdefault(name, value)
